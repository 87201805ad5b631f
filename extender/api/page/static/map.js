// The fleet map: layout, zoom and navigation.

import { Drawing } from "./draw.js";
import { LARGEST, SMALLEST, firstBelow, fit, arrange, legible } from "./layout.js";
import { oncePerFrame } from "./dom.js";

export class FleetMap {
  constructor({ scroller, canvas, spacer, fleet, paint, on }) {
    Object.assign(this, { scroller, canvas, spacer, fleet, paint, on });
    this.drawing = new Drawing(this);
    this.groups = [];
    this.kinds = new Set();
    this.zoom = 0; // 0 fits everything
    this.picked = -1;
    this.hovered = -1;
    this.requestDraw = oncePerFrame(() => this.drawing.draw());
    scroller.addEventListener("scroll", () => this.requestDraw(), { passive: true });
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
    this.drawing.resize();
    this.place();
  }

  get cell() {
    return this.zoom || this.fitted || 8;
  }

  /** Compute the layout again; keep `anchor` (a device and its height on the screen) in place. */
  place(anchor = null) {
    if (!this.width) return;
    if (!this.zoom) this.fitted = Math.max(legible(this.fleet.size), fit(this.fleet, this.groups, this.width, this.tall));
    this.plan = arrange(this.fleet, this.groups, this.cell, this.width);
    this.spotOf = new Int32Array(this.fleet.names.length).fill(-1); // position of each node, -1 if filtered out
    this.plan.nodes.forEach((node, spot) => (this.spotOf[node] = spot));
    this.spacer.style.height = `${Math.max(0, this.plan.height - this.tall)}px`;
    if (anchor) {
      const box = this.boxOf(anchor.device);
      if (box) this.scroller.scrollTop = box.y - anchor.offset;
    }
    this.requestDraw();
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

  /** Zoom with two fingers; one finger scrolls. */
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

  // --- positions -------------------------------------------------------------------------------

  /** Return a card's devices and their positions in it: MIG instances have widths by their shares. */
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

  /** Return a device's position in CSS pixels of the whole map, null if filtered out. */
  boxOf(device) {
    const { plan, fleet } = this;
    if (!plan || device >= fleet.size) return null;
    const node = fleet.nodeOf[device], spot = this.spotOf[node];
    if (!(spot >= 0)) return null; // a new node has no position yet
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

  /** Return the device at a position of the whole map, -1 if there is none. */
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
      this.requestDraw();
    }
    this.on.hover(device, event.offsetX, event.offsetY);
  }

  leave() {
    this.hovered = -1;
    this.on.hover(-1, 0, 0);
    this.requestDraw();
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
    this.requestDraw();
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
    const spot = this.spotOf[node] + direction;
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
