// Draw the visible part of the map on its canvas: cards as pixels, then labels and lines.

import { BUSY, NO_VALUE, FULL, CORDONED, NOT_READY, kindOf, STALE, UNHEALTHY, FOREIGN, EXCLUDED } from "./fleet.js";
import { firstBelow } from "./layout.js";
import { blit } from "./paint.js";
import { clean, count, plural } from "./dom.js";

const TEXT_FROM = 25, SECOND_LINE_FROM = 50, SHARES_FROM = 10;
const FONT = "ui-sans-serif, system-ui, sans-serif";

/** Draws a map from its layout, without changing it. */
export class Drawing {
  constructor(map) {
    this.map = map;
    this.context = map.canvas.getContext("2d", { alpha: false });
    this.words = new WeakMap(); // label of each group, kept while a zoom changes the layout
  }

  /** Read the size of the canvas. */
  resize() {
    this.picture = new ImageData(this.map.canvas.width, this.map.canvas.height);
    this.pixels = new Uint32Array(this.picture.data.buffer);
  }

  draw() {
    const { plan, ratio } = this.map;
    if (!plan || !this.map.width) return;
    const top = this.map.scroller.scrollTop;
    this.pixels.fill(this.map.paint.back);
    const from = firstBelow(plan, top), end = top + this.map.tall;
    let to = from;
    while (to < plan.nodes.length && plan.ys[to] <= end) to++;
    for (let spot = from; spot < to; spot++) this.drawNode(spot, top);
    this.context.putImageData(this.picture, 0, 0);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawHeads(top);
    if (plan.labels) for (let spot = from; spot < to; spot++) this.drawLabel(spot, top);
    else this.drawNodeState(from, to, top);
    if (this.map.cell >= TEXT_FROM) for (let spot = from; spot < to; spot++) this.drawTexts(spot, top);
    this.drawPick(this.map.hovered, top, 1);
    this.drawPick(this.map.picked, top, 2);
  }

  drawNode(spot, top) {
    const { plan, fleet, ratio } = this.map;
    const node = plan.nodes[spot];
    const first = fleet.nodeCard[node], last = fleet.nodeCard[node + 1];
    const x0 = plan.xs[spot], y0 = plan.ys[spot] + plan.labels - top;
    const side = Math.round(plan.cell * ratio);
    for (let card = first; card < last; card++) {
      const at = card - first;
      const x = Math.round((x0 + (at % plan.columns[spot]) * plan.pitch) * ratio);
      const y = Math.round((y0 + Math.floor(at / plan.columns[spot]) * plan.pitch) * ratio);
      if (y >= this.map.canvas.height || y + side <= 0) continue;
      this.drawCard(card, x, y, side);
    }
  }

  /** Draw a card: one device, or its MIG instances side by side, with widths by their shares. */
  drawCard(card, x, y, side) {
    const { fleet } = this.map;
    const first = fleet.cardStart[card], last = fleet.cardStart[card + 1];
    if (last - first === 1) return this.drawDevice(first, x, y, side, side);
    for (const part of this.map.parts(card, side)) this.drawDevice(part.device, x + part.x, y, part.width, side);
  }

  drawDevice(device, x, y, width, height) {
    const { fleet, paint } = this.map;
    const state = fleet.state[device];
    const isDim = this.map.kinds.size > 0 && !this.map.kinds.has(kindOf(state));
    const stamp = paint.stamp(state, fleet.shade(device, paint.color), width, height, isDim);
    blit(this.pixels, this.map.canvas.width, this.map.canvas.height, stamp, width, height, x, y);
    if (fleet.replicas[device] > 1 && this.map.cell >= SHARES_FROM) this.drawShares(device, x, y, width, height);
  }

  /** Draw a tick for each replica along the lower edge, filled if in use. */
  drawShares(device, x, y, width, height) {
    const { fleet, paint } = this.map;
    const shares = fleet.replicas[device], used = Math.min(fleet.used[device], shares);
    const tall = Math.max(2, Math.round(height * 0.12));
    const ticks = Math.min(shares, Math.floor(width / 3));
    const full = Math.round((used / shares) * ticks);
    const filled = pixel(paint.css.text), hollow = pixel(paint.css.back);
    const top = y + height - tall - Math.round(this.map.ratio);
    for (let row = Math.max(0, top); row < Math.min(top + tall, this.map.canvas.height); row++) {
      for (let tick = 0; tick < ticks; tick++) {
        const from = Math.round((tick / ticks) * width), to = Math.round(((tick + 1) / ticks) * width) - 1;
        const color = tick < full || (full === 0 && used > 0 && tick === 0) ? filled : hollow;
        for (let column = from + 1; column < to; column++) this.pixels[row * this.map.canvas.width + x + column] = color;
      }
    }
  }

  drawHeads(top) {
    const { context } = this;
    const { plan, paint } = this.map;
    for (const head of plan.heads) {
      if (!head.name || head.end < top || head.y > top + this.map.tall) continue;
      const stuck = Math.min(Math.max(head.y - top, 0), head.end - top - 30);
      context.fillStyle = paint.css.back;
      context.fillRect(head.x - 4, stuck, head.wide + 8, 26);
      context.textBaseline = "middle";
      context.font = `600 13px ${FONT}`;
      context.fillStyle = paint.css.text;
      const name = shorten(context, head.name.replace(/^NVIDIA[ -]/, ""), head.wide * 0.6);
      context.fillText(name, head.x, stuck + 14);
      const left = head.x + context.measureText(name).width + 10;
      context.font = `12px ${FONT}`;
      context.fillStyle = paint.css.muted;
      const words = this.about(head);
      let text = "";
      for (const word of words) {
        const longer = text ? `${text}  ·  ${word}` : word;
        if (left + context.measureText(longer).width > head.x + head.wide) break;
        text = longer;
      }
      context.fillText(text, left, stuck + 14.5);
    }
  }

  /** Return a group's counts as text; recomputed when the fleet changes. */
  about({ nodes }) {
    const { fleet } = this.map;
    const known = this.words.get(nodes);
    if (known?.version === fleet.version) return known.words;
    const counts = fleet.counts(nodes);
    const { kinds, instances, idleInstances } = counts;
    const [size, ...more] = fleet.sizeInWords(counts);
    // If the room is short, drop the last ones.
    const words = [size];
    if (counts.gpus) words.push(`${count(kinds[0] - idleInstances)} idle`);
    if (kinds[5]) words.push(`${count(kinds[5])} unhealthy`);
    if (kinds[7]) words.push(`${count(kinds[7])} excluded`);
    words.push(...more);
    if (instances) words.push(counts.gpus ? `${count(idleInstances)} of these idle` : `${count(idleInstances)} idle`);
    if (kinds[1]) words.push(`${count(kinds[1])} held idle`);
    words.push(plural(nodes.length, "node"));
    this.words.set(nodes, { version: fleet.version, words });
    return words;
  }

  drawLabel(spot, top) {
    const { context } = this;
    const { plan, paint, fleet } = this.map;
    const node = plan.nodes[spot];
    const y = plan.ys[spot] - top + 8;
    const nodeState = fleet.nodeState[node];
    const width = plan.widths[spot];
    context.textBaseline = "middle";
    context.font = `11px ${FONT}`;
    const mark = nodeState & NOT_READY ? "not ready" : nodeState & CORDONED ? "cordoned" : "";
    let room = width;
    if (mark) {
      context.fillStyle = paint.css.held;
      const wide = context.measureText(mark).width;
      if (wide < width * 0.6) {
        context.fillText(mark, plan.xs[spot] + width - wide, y);
        room -= wide + 6;
      }
    }
    context.fillStyle = nodeState & (NOT_READY | CORDONED) ? paint.css.muted : paint.css.text;
    context.fillText(shorten(context, fleet.names[node], room), plan.xs[spot], y);
  }

  /** Without labels, underline the nodes that accept no pods. */
  drawNodeState(from, to, top) {
    const { context } = this;
    const { plan, paint, fleet } = this.map;
    for (let spot = from; spot < to; spot++) {
      const nodeState = fleet.nodeState[plan.nodes[spot]];
      if (!(nodeState & (NOT_READY | CORDONED))) continue;
      context.fillStyle = nodeState & NOT_READY ? paint.css.unhealthy : paint.css.held;
      context.fillRect(plan.xs[spot], plan.ys[spot] + plan.heights[spot] - top, plan.widths[spot], 1);
    }
  }

  drawTexts(spot, top) {
    const { context } = this;
    const { plan, paint, fleet, cell } = this.map;
    const node = plan.nodes[spot];
    const first = fleet.nodeCard[node], last = fleet.nodeCard[node + 1];
    const column = fleet[paint.color];
    context.textAlign = "center";
    context.textBaseline = "middle";
    const size = cell >= SECOND_LINE_FROM ? 14 : cell >= 34 ? 12 : 10;
    context.strokeStyle = paint.css.bed;
    context.lineWidth = 4;
    context.lineJoin = "round";
    for (let card = first; card < last; card++) {
      const device = fleet.cardStart[card];
      if (fleet.cardStart[card + 1] - device !== 1) continue;
      const at = card - first, look = fleet.state[device] & 7;
      if (look === UNHEALTHY || look === FOREIGN || look === EXCLUDED || column[device] === NO_VALUE) continue;
      const x = plan.xs[spot] + (at % plan.columns[spot]) * plan.pitch + cell / 2;
      const y = plan.ys[spot] + plan.labels + Math.floor(at / plan.columns[spot]) * plan.pitch - top + cell / 2;
      const isDim = this.map.kinds.size > 0 && !this.map.kinds.has(kindOf(fleet.state[device]));
      if (isDim) continue;
      context.fillStyle = look !== BUSY ? paint.css.text : paint.isDeep(fleet.shade(device, paint.color)) ? "#ffffff" : "#10151b";
      const write = (text, height) => {
        if (look === STALE) context.strokeText(text, x, height); // an outline keeps it readable on hatching
        context.fillText(text, x, height);
      };
      const lift = cell >= SECOND_LINE_FROM ? 9 : 0;
      context.font = `600 ${size}px ${FONT}`;
      write(String(Math.round((column[device] / FULL) * 100)), y - lift);
      if (cell >= SECOND_LINE_FROM && fleet.memory[device] !== NO_VALUE) {
        context.font = `11px ${FONT}`;
        const gib = ((fleet.memory[device] / FULL) * fleet.memory_total[device] * fleet.unit) / 2 ** 30;
        write(`${gib < 10 ? gib.toFixed(1) : Math.round(gib)} GiB`, y + 9);
      }
    }
    context.textAlign = "left";
  }

  drawPick(device, top, thick) {
    const box = device >= 0 ? this.map.boxOf(device) : null;
    if (!box) return;
    this.context.strokeStyle = this.map.paint.css.pick;
    this.context.lineWidth = thick;
    this.context.strokeRect(box.x - 1.5, box.y - top - 1.5, box.width + 3, box.height + 3);
  }
}

const packed = new Map();

function pixel(hex) {
  let value = packed.get(hex);
  if (value === undefined) {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    packed.set(hex, (value = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0));
  }
  return value;
}

const short = new Map();

/** Shorten a name in the middle, because node names differ at the end. */
function shorten(context, raw, room) {
  const key = `${Math.round(room)} ${raw}`;
  let text = short.get(key);
  if (text === undefined) {
    text = clean(raw);
    if (context.measureText(text).width > room) {
      let keep = Math.max(3, Math.floor((room / context.measureText(text).width) * text.length) - 1);
      do {
        const head = Math.floor(keep * 0.4);
        text = `${clean(raw).slice(0, head)}…${clean(raw).slice(-(keep - head))}`;
        keep--;
      } while (keep > 2 && context.measureText(text).width > room);
    }
    if (short.size > 20000) short.clear();
    short.set(key, text);
  }
  return text;
}
