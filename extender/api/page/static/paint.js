// Signs for GPUs as blocks of pixels: the shape shows the state, the color activity or memory.

import { ASSUMED, BUSY, EXCLUDED, FOREIGN, FULL, HELD, IDLE, LESS, UNKNOWN, UNHEALTHY, STALE, NO_VALUE } from "./fleet.js";

const LIGHT = {
  back: "#f7f8fa", bed: "#e7eaef", line: "#cfd5dd", text: "#1c2128", muted: "#5d6773", pick: "#0b57d0",
  idle: "#1f9d61", held: "#b35900", unhealthy: "#c9252d", foreign: "#7a3fd0", unknown: "#8b95a1", assumed: "#0b57d0",
  activity: ["#dcefe9", "#a9d5d1", "#63a9b8", "#2f7396", "#1b3f6b", "#15264a"],
  memory: ["#efe9f6", "#d0bfe6", "#a98bcf", "#8059b3", "#5a3490", "#3a1c66"],
  dark: false,
};
const DARK = {
  back: "#0f1318", bed: "#1e252d", line: "#333c47", text: "#e4e8ed", muted: "#939da9", pick: "#7ab7ff",
  idle: "#3ddc8b", held: "#ffb057", unhealthy: "#ff6b6b", foreign: "#bf94ff", unknown: "#6d7884", assumed: "#7ab7ff",
  activity: ["#15302c", "#1c5150", "#25797f", "#3ea6ad", "#8fd0c4", "#e6f5d9"],
  memory: ["#241c33", "#40295f", "#613f90", "#8a61bd", "#b995dd", "#eadcf8"],
  dark: true,
};
const BUCKETS = 20;

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const pack = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
const mix = (a, b, part) => a.map((value, at) => Math.round(value + (b[at] - value) * part));

function ramp(stops) {
  const colors = [];
  const parts = stops.map(rgb);
  for (let bucket = 0; bucket <= BUCKETS; bucket++) {
    const at = (bucket / BUCKETS) * (parts.length - 1);
    const low = Math.min(Math.floor(at), parts.length - 2);
    colors.push(mix(parts[low], parts[low + 1], at - low));
  }
  return colors;
}

export class Paint {
  constructor(isDark) {
    const source = isDark ? DARK : LIGHT;
    this.ratio = Math.min(devicePixelRatio || 1, 2);
    this.css = source;
    this.back = pack(rgb(source.back));
    this.raw = Object.fromEntries(["back", "bed", "line", "idle", "held", "unhealthy", "foreign", "unknown", "assumed"].map((name) => [name, rgb(source[name])]));
    this.ramps = { activity: ramp(source.activity), memory: ramp(source.memory) };
    this.setColor("activity");
  }

  setColor(name) {
    this.color = name;
    this.ramp = this.ramps[name];
    this.stamps = new Map();
  }

  bucket(value) {
    return value === NO_VALUE ? BUCKETS + 1 : Math.round((Math.min(value, FULL) * BUCKETS) / FULL);
  }

  fill(bucket) {
    return bucket > BUCKETS ? mix(this.raw.bed, this.raw.unknown, 0.35) : this.ramp[bucket];
  }

  /** Return whether text on a filled cell should be light. */
  isDeep(value) {
    const [r, g, b] = this.fill(this.bucket(value));
    return r * 0.299 + g * 0.587 + b * 0.114 < 140;
  }

  /** Return the pixels of a sign of the given size in device pixels. */
  stamp(state, value, width, height, isDim) {
    const bucket = this.bucket(value);
    const key = (((state & 63) * 32 + bucket) * 2 + (isDim ? 1 : 0)) * 65536 + width * 256 + height;
    let pixels = this.stamps.get(key);
    if (!pixels) {
      if (this.stamps.size > 6000) this.stamps.clear();
      this.stamps.set(key, (pixels = this.draw(state, bucket, width, height, isDim)));
    }
    return pixels;
  }

  draw(state, bucket, width, height, isDim) {
    const look = state & 7;
    const { raw } = this;
    const grid = new Array(width * height).fill(null);
    const put = (x, y, color) => {
      if (x >= 0 && y >= 0 && x < width && y < height) grid[y * width + x] = color;
    };
    const each = (color, test) => {
      for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) if (test(x, y)) put(x, y, color);
    };
    if (width < 3 || height < 3) this.drawThin(look, bucket, each, width, height);
    else if (look === BUSY) each(this.fill(bucket), () => true);
    else if (look === IDLE) {
      const edge = Math.max(1, Math.min(Math.round(Math.min(width, height) * 0.13), Math.round(3 * this.ratio)));
      each(width < 6 ? mix(raw.back, raw.idle, 0.12) : mix(this.fill(Math.min(bucket, BUCKETS)), raw.back, 0.25), () => true);
      each(raw.idle, (x, y) => x < edge || y < edge || x >= width - edge || y >= height - edge);
      if (state & HELD) this.drawHeld(each, width, height);
    } else if (look === STALE) {
      each(raw.bed, () => true);
      const color = mix(this.fill(bucket), raw.unknown, 0.25);
      each(color, (x, y) => x * height <= y * width && (width < 8 || (x + y) % 4 !== 0));
    } else if (look === UNKNOWN) {
      each(raw.bed, () => true);
      if (width < 6) each(raw.unknown, (x, y) => y === height >> 1 && x > 0 && x < width - 1);
      else this.drawDot(each, width, height, raw.unknown, 0.16);
    } else if (look === UNHEALTHY) {
      each(mix(raw.back, raw.unhealthy, 0.2), () => true);
      // Large cells get a sign of moderate size in the middle, to keep the map calm.
      const [cx, cy, reach] = this.middle(width, height);
      const thick = Math.max(0.8, reach * 0.2);
      const slope = width / height;
      each(raw.unhealthy, (x, y) => {
        const dx = x - cx, dy = (y - cy) * slope;
        return Math.max(Math.abs(dx), Math.abs(dy)) <= reach && Math.min(Math.abs(dx - dy), Math.abs(dx + dy)) < thick;
      });
    } else if (look === EXCLUDED) {
      each(raw.bed, () => true);
      const [cx, cy, reach] = this.middle(width, height);
      each(raw.unhealthy, (x, y) => Math.abs(x - cx) <= reach && Math.abs(y - cy) <= Math.max(0.8, reach * 0.2));
    } else if (look === FOREIGN) {
      each(mix(raw.back, raw.foreign, 0.16), () => true);
      const [cx, cy, reach] = this.middle(width, height);
      each(raw.foreign, (x, y) => Math.abs(x - cx) + (Math.abs(y - cy) * width) / height <= reach + 0.01);
    }
    if (width >= 8 && height >= 8) this.drawMarks(state, each, width);
    const dim = (color) => (isDim ? mix(color, raw.back, 0.8) : color);
    return Uint32Array.from(grid, (color) => (color ? pack(dim(color)) : 0));
  }

  /** Draw signs too narrow for a shape; they differ in height and position. */
  drawThin(look, bucket, each, width, height) {
    const { raw } = this;
    const tests = {
      [BUSY]: [this.fill(bucket), () => true],
      [IDLE]: [raw.idle, (x, y) => y === 0 || y === height - 1],
      [STALE]: [mix(this.fill(bucket), raw.unknown, 0.4), (x, y) => y >= height / 2],
      [UNKNOWN]: [raw.unknown, (x, y) => y === height >> 1],
      [UNHEALTHY]: [raw.unhealthy, (x, y) => y % 2 === 0],
      [FOREIGN]: [raw.foreign, (x, y) => y >= height / 3 && y < (height * 2) / 3],
      [EXCLUDED]: [raw.unhealthy, (x, y) => y === height >> 1],
    };
    each(raw.bed, () => true);
    each(...tests[look]);
  }

  /** Return the middle of a cell, and half the width of its sign. */
  middle(width, height) {
    return [(width - 1) / 2, (height - 1) / 2, Math.min(width / 2, Math.max(8 * this.ratio, width * 0.19))];
  }

  /** Draw a dot if a pod holds the GPU, in the corner if the middle has text. */
  drawHeld(each, width, height) {
    const side = Math.min(width, height);
    if (side < 6) return each(this.raw.held, (x, y) => x === y && x > 0 && x < width - 1);
    if (side < 25 * this.ratio) return this.drawDot(each, width, height, this.raw.held, side < 12 ? 0.2 : 0.15);
    const [radius, inset] = side < 40 * this.ratio ? [2.4 * this.ratio, 6 * this.ratio] : [3.2 * this.ratio, 8 * this.ratio];
    const cx = width - 1 - inset, cy = height - 1 - inset;
    each(this.raw.held, (x, y) => (x - cx) ** 2 + (y - cy) ** 2 <= radius * radius);
  }

  drawDot(each, width, height, color, share) {
    const radius = Math.max(0.6, Math.min(width, height) * share);
    const cx = (width - 1) / 2, cy = (height - 1) / 2;
    each(color, (x, y) => (x - cx) ** 2 + (y - cy) ** 2 <= radius * radius);
  }

  /** Mark corners: pods just placed (top left), reduced health (top right). */
  drawMarks(state, each, width) {
    const size = Math.max(3, Math.min(Math.round(width * 0.25), Math.round(9 * this.ratio)));
    if (state & ASSUMED) each(this.raw.assumed, (x, y) => x + y < size);
    if (state & LESS) each(this.raw.unhealthy, (x, y) => width - 1 - x + y < size);
  }
}

/** Copy a stamp into the picture; skip rows outside. */
export function blit(picture, pictureWidth, pictureHeight, stamp, width, height, left, top) {
  const first = top < 0 ? -top : 0;
  const last = Math.min(height, pictureHeight - top);
  for (let row = first; row < last; row++) {
    let from = row * width;
    let to = (top + row) * pictureWidth + left;
    for (let column = 0; column < width; column++, from++, to++) {
      const pixel = stamp[from];
      if (pixel) picture[to] = pixel;
    }
  }
}

/** Draw a sign on its own canvas for a legend; decorative. */
export function signCanvas(paint, state, value, size) {
  const ratio = Math.min(devicePixelRatio || 1, 2);
  const side = Math.round(size * ratio);
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  canvas.className = "sign";
  canvas.setAttribute("aria-hidden", "true");
  canvas.style.width = canvas.style.height = `${size}px`;
  const picture = new ImageData(side, side);
  new Uint32Array(picture.data.buffer).set(paint.stamp(state, value, side, side, false));
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}
