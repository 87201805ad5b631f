// The fleet map: a canvas that draws what is in sight, and how one gets about on it.

import { BUSY, UNKNOWN, FULL, CORDONED, NOT_READY, kindOf, SICK, FOREIGN } from "./fleet.js";
import { LARGEST, SMALLEST, firstBelow, fit, layOut, legible } from "./layout.js";
import { blit } from "./paint.js";
import { clean, count, oncePerFrame, plural } from "./dom.js";

const TEXT_FROM = 25, SECOND_LINE_FROM = 50, SHARES_FROM = 10;
const FONT = "ui-sans-serif, system-ui, sans-serif";

export class FleetMap {
  constructor({ scroller, canvas, spacer, fleet, paint, on }) {
    Object.assign(this, { scroller, canvas, spacer, fleet, paint, on });
    this.context = canvas.getContext("2d", { alpha: false });
    this.groups = [];
    this.kinds = new Set();
    this.zoom = 0; // 0 fits everything
    this.picked = -1;
    this.hovered = -1;
    this.frames = [];
    this.ask = oncePerFrame(() => this.draw());
    scroller.addEventListener("scroll", () => this.ask(), { passive: true });
    scroller.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("click", (event) => this.click(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    this.pinch();
    new ResizeObserver(() => this.resize()).observe(scroller);
  }

  setGroups(groups, kinds) {
    this.groups = groups;
    this.kinds = kinds;
    this.place();
  }

  resize() {
    if (!this.scroller.clientWidth) return;
    this.ratio = Math.min(devicePixelRatio || 1, 2);
    this.width = this.scroller.clientWidth;
    this.tall = this.scroller.clientHeight;
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.tall * this.ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.tall}px`;
    this.picture = new ImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.picture.data.buffer);
    this.place();
  }

  get cell() {
    return this.zoom || this.fitted || 8;
  }

  /** Lay everything out anew; what stands at `anchor` (a device, and its height on the screen) stays there. */
  place(anchor = null) {
    if (!this.width) return;
    if (!this.zoom) this.fitted = Math.max(legible(this.fleet.size), fit(this.fleet, this.groups, this.width, this.tall));
    this.plan = layOut(this.fleet, this.groups, this.cell, this.width);
    this.spotOf = new Map();
    this.plan.nodes.forEach((node, spot) => this.spotOf.set(node, spot));
    this.spacer.style.height = `${Math.max(0, this.plan.height - this.tall)}px`;
    if (anchor) {
      const box = this.boxOf(anchor.device);
      if (box) this.scroller.scrollTop = box.y - anchor.offset;
    }
    this.ask();
  }

  setZoom(zoom, at = null) {
    const next = zoom ? Math.max(SMALLEST, Math.min(LARGEST, Math.round(zoom))) : 0;
    if (next === this.zoom) return;
    const device = at ? this.near(at.x, at.y) : this.picked;
    const box = device >= 0 ? this.boxOf(device) : null;
    const anchor = box ? { device, offset: box.y - this.scroller.scrollTop } : null;
    this.zoom = next;
    this.place(anchor && anchor.offset > -50 && anchor.offset < this.tall ? anchor : null);
    this.on.zoom(this.zoom);
  }

  step(direction, at = null) {
    this.exact = null;
    const cell = this.cell;
    this.setZoom(direction > 0 ? Math.max(cell + 1, cell * 1.2) : Math.min(cell - 1, cell / 1.2), at);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const from = this.exact && Math.round(this.exact) === this.cell ? this.exact : this.cell;
    this.exact = Math.max(SMALLEST, Math.min(LARGEST, from * Math.exp(-event.deltaY * 0.004)));
    this.setZoom(this.exact, { x: event.offsetX, y: event.offsetY + this.scroller.scrollTop });
  }

  /** Two fingers zoom; one scrolls, as everywhere. */
  pinch() {
    let start = null;
    const spread = (touches) => Math.hypot(touches[0].clientX - touches[1].clientX, touches[0].clientY - touches[1].clientY);
    this.canvas.addEventListener("touchstart", (event) => {
      if (event.touches.length === 2) start = { spread: spread(event.touches), cell: this.cell };
    }, { passive: true });
    this.canvas.addEventListener("touchmove", (event) => {
      if (event.touches.length !== 2 || !start) return;
      event.preventDefault();
      this.setZoom((start.cell * spread(event.touches)) / start.spread);
    }, { passive: false });
    this.canvas.addEventListener("touchend", () => (start = null), { passive: true });
  }

  // --- drawing ---------------------------------------------------------------------------------

  draw() {
    if (!this.plan || !this.width) return;
    const began = performance.now();
    const top = this.scroller.scrollTop;
    this.pixels.fill(this.paint.back);
    const from = firstBelow(this.plan, top), end = top + this.tall;
    let to = from;
    while (to < this.plan.nodes.length && this.plan.ys[to] <= end) to++;
    for (let spot = from; spot < to; spot++) this.drawNode(spot, top);
    this.context.putImageData(this.picture, 0, 0);
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.drawHeads(top);
    if (this.plan.labels) for (let spot = from; spot < to; spot++) this.drawLabel(spot, top);
    else this.drawStanding(from, to, top);
    if (this.cell >= TEXT_FROM) for (let spot = from; spot < to; spot++) this.drawTexts(spot, top);
    this.drawPick(this.hovered, top, 1);
    this.drawPick(this.picked, top, 2);
    this.frames.push(performance.now() - began);
    if (this.frames.length > 600) this.frames.splice(0, 300);
  }

  drawNode(spot, top) {
    const { plan, fleet, ratio } = this;
    const node = plan.nodes[spot];
    const first = fleet.nodeCard[node], last = fleet.nodeCard[node + 1];
    const x0 = plan.xs[spot], y0 = plan.ys[spot] + plan.labels - top;
    const side = Math.round(plan.cell * ratio);
    for (let card = first; card < last; card++) {
      const at = card - first;
      const x = Math.round((x0 + (at % plan.columns[spot]) * plan.pitch) * ratio);
      const y = Math.round((y0 + Math.floor(at / plan.columns[spot]) * plan.pitch) * ratio);
      if (y >= this.canvas.height || y + side <= 0) continue;
      this.drawCard(card, x, y, side);
    }
  }

  /** A card: one device, or its MIG instances side by side, as wide as their shares of it. */
  drawCard(card, x, y, side) {
    const { fleet } = this;
    const first = fleet.cardStart[card], last = fleet.cardStart[card + 1];
    if (last - first === 1) return this.drawDevice(first, x, y, side, side);
    for (const part of this.parts(card, side)) this.drawDevice(part.device, x + part.x, y, part.width, side);
  }

  parts(card, side) {
    const { fleet } = this;
    const first = fleet.cardStart[card], last = fleet.cardStart[card + 1];
    let slices = 0;
    for (let device = first; device < last; device++) slices += fleet.slices[fleet.profile[device]];
    const gap = side >= 20 * this.ratio ? Math.round(this.ratio) : 0;
    const parts = [];
    let done = 0;
    for (let device = first; device < last; device++) {
      const x = Math.round((done / slices) * side);
      done += fleet.slices[fleet.profile[device]];
      const width = Math.max(1, Math.round((done / slices) * side) - x - (device < last - 1 ? gap : 0));
      parts.push({ device, x: Math.min(x, side - 1), width });
    }
    return parts;
  }

  drawDevice(device, x, y, width, height) {
    const { fleet, paint } = this;
    const state = fleet.state[device];
    const isDim = this.kinds.size > 0 && !this.kinds.has(kindOf(state));
    const value = fleet[paint.color][device];
    const stamp = paint.stamp(state, value, width, height, isDim);
    blit(this.pixels, this.canvas.width, this.canvas.height, stamp, width, height, x, y);
    if (fleet.replicas[device] > 1 && this.cell >= SHARES_FROM) this.drawShares(device, x, y, width, height);
  }

  /** Replicas: a tick for each along the lower edge, filled where a pod has it. */
  drawShares(device, x, y, width, height) {
    const { fleet, paint } = this;
    const shares = fleet.replicas[device], used = Math.min(fleet.used[device], shares);
    const tall = Math.max(2, Math.round(height * 0.12));
    const ticks = Math.min(shares, Math.floor(width / 3));
    const full = Math.round((used / shares) * ticks);
    const filled = pixel(paint.css.text), hollow = pixel(paint.css.back);
    const top = y + height - tall - Math.round(this.ratio);
    for (let row = Math.max(0, top); row < Math.min(top + tall, this.canvas.height); row++) {
      for (let tick = 0; tick < ticks; tick++) {
        const from = Math.round((tick / ticks) * width), to = Math.round(((tick + 1) / ticks) * width) - 1;
        const color = tick < full || (full === 0 && used > 0 && tick === 0) ? filled : hollow;
        for (let column = from + 1; column < to; column++) this.pixels[row * this.canvas.width + x + column] = color;
      }
    }
  }

  drawHeads(top) {
    const { context, plan, paint } = this;
    for (const head of plan.heads) {
      if (!head.name || head.end < top || head.y > top + this.tall) continue;
      const stuck = Math.min(Math.max(head.y - top, 0), head.end - top - 30);
      context.fillStyle = paint.css.back;
      context.fillRect(head.x - 4, stuck, head.wide + 8, 26);
      context.textBaseline = "middle";
      context.font = `600 13px ${FONT}`;
      context.fillStyle = paint.css.text;
      const name = shorten(context, head.name, head.wide * 0.6);
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

  /** What a group has, in a few words; counted anew when the fleet looks otherwise. */
  about(head) {
    if (head.version !== this.fleet.version) {
      const counts = this.fleet.counts(head.nodes);
      const devices = counts.reduce((sum, one) => sum + one, 0);
      head.words = [plural(head.nodes.length, "node"), plural(devices, "GPU"), `${count(counts[0])} idle`];
      if (counts[1]) head.words.push(`${count(counts[1])} idle, held`);
      if (counts[5]) head.words.push(`${count(counts[5])} sick`);
      head.version = this.fleet.version;
    }
    return head.words;
  }

  drawLabel(spot, top) {
    const { context, plan, paint, fleet } = this;
    const node = plan.nodes[spot];
    const y = plan.ys[spot] - top + 8;
    const standing = fleet.standing[node];
    const width = plan.widths[spot];
    context.textBaseline = "middle";
    context.font = `11px ${FONT}`;
    const mark = standing & NOT_READY ? "not ready" : standing & CORDONED ? "cordoned" : "";
    let room = width;
    if (mark) {
      context.fillStyle = paint.css.held;
      const wide = context.measureText(mark).width;
      if (wide < width * 0.6) {
        context.fillText(mark, plan.xs[spot] + width - wide, y);
        room -= wide + 6;
      }
    }
    context.fillStyle = standing & (NOT_READY | CORDONED) ? paint.css.muted : paint.css.text;
    context.fillText(shorten(context, fleet.names[node], room), plan.xs[spot], y);
  }

  /** Without labels: nodes that take no pods have a line under them. */
  drawStanding(from, to, top) {
    const { plan, context, paint, fleet } = this;
    for (let spot = from; spot < to; spot++) {
      const standing = fleet.standing[plan.nodes[spot]];
      if (!(standing & (NOT_READY | CORDONED))) continue;
      context.fillStyle = standing & NOT_READY ? paint.css.sick : paint.css.held;
      context.fillRect(plan.xs[spot], plan.ys[spot] + plan.heights[spot] - top, plan.widths[spot], 1);
    }
  }

  drawTexts(spot, top) {
    const { plan, context, paint, fleet, cell } = this;
    const node = plan.nodes[spot];
    const first = fleet.nodeCard[node], last = fleet.nodeCard[node + 1];
    const column = fleet[paint.color];
    context.textAlign = "center";
    context.textBaseline = "middle";
    const size = cell >= SECOND_LINE_FROM ? 14 : cell >= 34 ? 12 : 10;
    for (let card = first; card < last; card++) {
      const device = fleet.cardStart[card];
      if (fleet.cardStart[card + 1] - device !== 1) continue;
      const at = card - first, look = fleet.state[device] & 7;
      if (look === SICK || look === FOREIGN || column[device] === UNKNOWN) continue;
      const x = plan.xs[spot] + (at % plan.columns[spot]) * plan.pitch + cell / 2;
      const y = plan.ys[spot] + plan.labels + Math.floor(at / plan.columns[spot]) * plan.pitch - top + cell / 2;
      const isDim = this.kinds.size > 0 && !this.kinds.has(kindOf(fleet.state[device]));
      if (isDim) continue;
      context.fillStyle = look !== BUSY ? paint.css.text : paint.isDeep(column[device]) ? "#ffffff" : "#10151b";
      const lift = cell >= SECOND_LINE_FROM ? 9 : 0;
      context.font = `600 ${size}px ${FONT}`;
      context.fillText(String(Math.round((column[device] / FULL) * 100)), x, y - lift);
      if (cell >= SECOND_LINE_FROM && fleet.memory[device] !== UNKNOWN) {
        context.font = `11px ${FONT}`;
        const gib = ((fleet.memory[device] / FULL) * fleet.memory_total[device] * fleet.unit) / 2 ** 30;
        context.fillText(`${gib < 10 ? gib.toFixed(1) : Math.round(gib)} GiB`, x, y + 9);
      }
    }
    context.textAlign = "left";
  }

  drawPick(device, top, thick) {
    const box = device >= 0 ? this.boxOf(device) : null;
    if (!box) return;
    this.context.strokeStyle = this.paint.css.pick;
    this.context.lineWidth = thick;
    this.context.strokeRect(box.x - 1.5, box.y - top - 1.5, box.width + 3, box.height + 3);
  }

  // --- who is where ----------------------------------------------------------------------------

  /** A device's place in CSS pixels of the whole map, null where it is filtered out. */
  boxOf(device) {
    const { plan, fleet } = this;
    if (!plan || device >= fleet.size) return null;
    const node = fleet.nodeOf[device], spot = this.spotOf.get(node);
    if (spot === undefined) return null;
    let card = fleet.nodeCard[node];
    while (fleet.cardStart[card + 1] <= device) card++;
    const at = card - fleet.nodeCard[node];
    const box = {
      x: plan.xs[spot] + (at % plan.columns[spot]) * plan.pitch,
      y: plan.ys[spot] + plan.labels + Math.floor(at / plan.columns[spot]) * plan.pitch,
      width: plan.cell, height: plan.cell,
    };
    if (fleet.cardStart[card + 1] - fleet.cardStart[card] > 1) {
      const part = this.parts(card, Math.round(plan.cell * this.ratio)).find((one) => one.device === device);
      box.x += part.x / this.ratio;
      box.width = part.width / this.ratio;
    }
    return box;
  }

  /** The device at a place of the whole map, -1 where there is none. */
  deviceAt(x, y, slack = 0) {
    const { plan, fleet } = this;
    if (!plan) return -1;
    for (let spot = firstBelow(plan, y - slack); spot < plan.nodes.length && plan.ys[spot] <= y + slack; spot++) {
      if (x < plan.xs[spot] - slack || x > plan.xs[spot] + plan.widths[spot] + slack) continue;
      const node = plan.nodes[spot];
      const column = Math.floor((x - plan.xs[spot]) / plan.pitch);
      const row = Math.floor((y - plan.ys[spot] - plan.labels) / plan.pitch);
      const first = fleet.nodeCard[node], last = fleet.nodeCard[node + 1];
      const across = Math.max(0, Math.min(column, plan.columns[spot] - 1));
      const card = first + Math.max(0, row) * plan.columns[spot] + across;
      if (card >= last || (row < 0 && !slack && !plan.labels)) continue;
      const parts = this.parts(card, Math.round(plan.cell * this.ratio));
      const inside = (x - plan.xs[spot] - across * plan.pitch) * this.ratio;
      return (parts.findLast((part) => part.x <= inside) ?? parts[0]).device;
    }
    return -1;
  }

  near(x, y) {
    for (const slack of [0, 12, 60]) {
      const device = this.deviceAt(x, y, slack);
      if (device >= 0) return device;
    }
    return -1;
  }

  hover(event) {
    if (event.pointerType === "touch") return;
    const device = this.deviceAt(event.offsetX, event.offsetY + this.scroller.scrollTop);
    if (device !== this.hovered) {
      this.hovered = device;
      this.ask();
    }
    this.on.hover(device, event.offsetX, event.offsetY);
  }

  leave() {
    this.hovered = -1;
    this.on.hover(-1, 0, 0);
    this.ask();
  }

  click(event) {
    const device = this.deviceAt(event.offsetX, event.offsetY + this.scroller.scrollTop, event.pointerType === "touch" ? 6 : 0);
    if (device >= 0) {
      this.pick(device);
      this.on.open(device);
    }
  }

  pick(device, isShown = false) {
    this.picked = device;
    if (isShown) {
      const box = this.boxOf(device);
      if (box) {
        const top = this.scroller.scrollTop;
        if (box.y < top + 40) this.scroller.scrollTop = box.y - 40;
        else if (box.y + box.height > top + this.tall - 10) this.scroller.scrollTop = box.y + box.height - this.tall + 10;
      }
    }
    this.ask();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowRight: () => this.beside(1), ArrowLeft: () => this.beside(-1),
      ArrowDown: () => this.above(1), ArrowUp: () => this.above(-1),
      Home: () => this.deviceOfSpot(0), End: () => this.deviceOfSpot(this.plan.nodes.length - 1),
    };
    if (moves[event.key]) {
      event.preventDefault();
      const device = this.picked < 0 || !this.boxOf(this.picked) ? this.deviceOfSpot(0) : moves[event.key]();
      if (device >= 0) {
        this.pick(device, true);
        this.on.speak(device);
      }
    } else if (event.key === "Enter" && this.picked >= 0) this.on.open(this.picked);
  }

  deviceOfSpot(spot) {
    return spot >= 0 && spot < this.plan.nodes.length ? this.fleet.nodeStart[this.plan.nodes[spot]] : -1;
  }

  beside(direction) {
    const { fleet } = this;
    const node = fleet.nodeOf[this.picked], next = this.picked + direction;
    if (next >= fleet.nodeStart[node] && next < fleet.nodeStart[node + 1]) return next;
    const spot = this.spotOf.get(node) + direction;
    if (spot < 0 || spot >= this.plan.nodes.length) return -1;
    const other = this.plan.nodes[spot];
    return direction > 0 ? fleet.nodeStart[other] : fleet.nodeStart[other + 1] - 1;
  }

  above(direction) {
    const box = this.boxOf(this.picked);
    const x = box.x + box.width / 2;
    let y = box.y + box.height / 2;
    for (let tries = 0; tries < 60; tries++) {
      y += direction * Math.max(this.plan.pitch, 6);
      if (y < 0 || y > this.plan.height) return -1;
      const device = this.deviceAt(x, y, tries > 6 ? 30 : 0);
      if (device >= 0 && Math.abs(this.boxOf(device).y - box.y) >= 1) return device;
    }
    return -1;
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

/** A name that fits: its end tells nodes apart, so the middle goes. */
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
