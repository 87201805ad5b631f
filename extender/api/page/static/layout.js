// Compute the position of every node for a cell size; pure, and fast enough to repeat while zooming.

export const SMALLEST = 3, LARGEST = 76;
const PAD = 14, HEAD = 30, COLUMNS = 8;
const HEAD_WIDTH = 300, GROUP_GAP = 36;
const LABEL_FROM = 13, LABEL_HEIGHT = 17, LABEL_WIDTH = 104;

export const gapOf = (cell) => (cell >= 26 ? 3 : cell >= 9 ? 2 : 1);
export const hasLabels = (cell) => cell >= LABEL_FROM;

/** Return the positions of groups and nodes in CSS pixels; nodes in display order. */
export function arrange(fleet, groups, cell, width) {
  const gap = gapOf(cell);
  const pitch = cell + gap;
  const labels = hasLabels(cell) ? LABEL_HEIGHT : 0;
  const space = Math.max(3, Math.round(cell * 0.34)) + (labels ? 6 : 0);
  const most = Math.max(1, Math.min(COLUMNS, Math.floor((width - 2 * PAD + gap) / pitch)));
  let total = 0;
  for (const group of groups) total += group.nodes.length;
  const nodes = new Uint32Array(total), xs = new Int32Array(total), ys = new Int32Array(total);
  const columns = new Uint8Array(total), widths = new Int32Array(total), heights = new Int32Array(total);
  const bottoms = new Int32Array(total); // lower edge of each node's row
  const heads = [];
  let at = 0, y = 6, rowFrom = 0, tallest = 0;
  const endRow = () => {
    bottoms.fill(y + tallest, rowFrom, at);
    rowFrom = at;
    tallest = 0;
  };
  // Place groups of one short row side by side: otherwise a dozen nodes leave most of the page empty.
  let beside = null;
  for (const group of groups) {
    const rough = roughWidth(fleet, group, pitch, most, space, gap, labels);
    const isShort = group.name && rough <= width - 2 * PAD;
    const wide = Math.max(rough, HEAD_WIDTH);
    const left = beside && isShort && beside.right + GROUP_GAP + wide <= width - PAD ? beside.right + GROUP_GAP : 0;
    const x0 = left || PAD;
    // If nothing fits beside it, a heading takes the rest of the row: a fifth more on a phone.
    const isLast = !isShort || x0 + wide + GROUP_GAP + HEAD_WIDTH > width - PAD;
    const head = { name: group.name, x: x0, wide: isLast ? width - PAD - x0 : wide, from: at, nodes: group.nodes };
    if (left) head.y = beside.y;
    else {
      if (beside) {
        endRow();
        y = beside.end;
      }
      head.y = y;
    }
    if (group.name && !left) y += HEAD;
    let x = head.x;
    for (const node of group.nodes) {
      const cards = Math.max(1, fleet.nodeCard[node + 1] - fleet.nodeCard[node]);
      const across = Math.min(cards, most);
      const room = Math.max(across * pitch - gap, labels ? Math.min(LABEL_WIDTH, width - 2 * PAD) : 0);
      const tall = labels + Math.ceil(cards / across) * pitch - gap;
      if (x > head.x && x + room > width - PAD) {
        const next = y + tallest + space;
        endRow();
        x = PAD;
        y = next;
      }
      nodes[at] = node;
      xs[at] = x;
      ys[at] = y;
      columns[at] = across;
      widths[at] = room;
      heights[at] = tall;
      at++;
      x += room + space;
      tallest = Math.max(tallest, tall);
    }
    head.to = at;
    head.end = y + tallest + space + 8;
    if (isShort) {
      const end = Math.max(head.end, left ? beside.end : 0);
      beside = { right: head.x + wide, y: head.y, end };
    } else {
      endRow();
      beside = null;
      y = head.end;
    }
    heads.push(head);
  }
  endRow();
  if (beside) y = beside.end;
  return { cell, gap, pitch, labels, width, nodes, xs, ys, columns, widths, heights, bottoms, heads, height: y + 8 };
}

/** Return a group's width in one row; stop counting once it is too wide. */
function roughWidth(fleet, group, pitch, most, space, gap, labels) {
  if (group.nodes.length > 24) return Infinity;
  let wide = 0;
  for (const node of group.nodes) {
    const cards = Math.max(1, fleet.nodeCard[node + 1] - fleet.nodeCard[node]);
    wide += Math.max(Math.min(cards, most) * pitch - gap, labels ? LABEL_WIDTH : 0) + space;
  }
  return wide - space;
}

/** Return the largest cell size at which everything is visible. */
export function fit(fleet, groups, width, height) {
  let low = SMALLEST, high = LARGEST;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (arrange(fleet, groups, middle, width).height <= height) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Smallest cell size for few GPUs: beyond this the map scrolls. */
export const legible = (devices) => (devices <= 80 ? 26 : devices <= 600 ? 16 : SMALLEST);

/** Return the position of the first node whose row is not above `y`. */
export function firstBelow(plan, y) {
  let low = 0, high = plan.ys.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (plan.bottoms[middle] < y) low = middle + 1;
    else high = middle;
  }
  return low;
}
