// DOM helpers: create and update elements, sanitize texts, format numbers.

const SVG = "http://www.w3.org/2000/svg";
// Control characters, and characters that reorder or hide surrounding text.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffc]/g;
const LONGEST = 300;
// Attributes with machine-readable values, which must not be sanitized.
const EXACT = new Set(["d", "value", "data-key"]);
const HANDLERS = ["onclick", "onchange", "oninput"];

export const byId = (id) => document.getElementById(id);

/** Remove characters from untrusted text that hide or reorder the text beside it. */
export function clean(text) {
  const shown = String(text ?? "").replace(UNSEEN, "\ufffd");
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST)}…` : shown;
}

/** Create an element; children are elements or texts, `null` is skipped. Texts never become markup. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Create an SVG element in the same way. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element[name] = value; // a property, so that `renew` can hand it on
    else element.setAttribute(name, value === true ? "" : EXACT.has(name) ? value : clean(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : clean(child));
  }
}

export function show(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/**
 * Like `show`, but without disturbing the reader: existing elements stay and take over the new content.
 * Focus, selection and open details are preserved; children are matched by `data-key` if they have one.
 */
export function renew(element, ...children) {
  const focused = document.activeElement;
  const now = document.createElement("div");
  append(now, children);
  match(element, now);
  // Moving a row would remove the focus from it: restore it.
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

/** Replace an element's children with those of another element, reusing those that match. */
function match(element, other) {
  const keyed = new Map();
  for (const child of element.children) if (child.dataset.key !== undefined) keyed.set(child.dataset.key, child);
  // Remove missing rows first: then no other row moves and loses its selection.
  const keys = new Set([...other.children].map((child) => child.dataset.key));
  for (const [key, child] of keyed) if (!keys.has(key)) child.remove();
  let next = element.firstChild;
  for (const child of [...other.childNodes]) {
    const key = child.dataset?.key;
    let kept = key === undefined ? firstAlike(next, child) : keyed.get(key);
    keyed.delete(key); // a second child with this key is a new element
    if (kept && isAlike(kept, child)) update(kept, child);
    else kept = child;
    if (kept === next) next = next.nextSibling;
    else element.insertBefore(kept, next);
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

function firstAlike(next, child) {
  let node = next;
  while (node && (node.dataset?.key !== undefined || !isAlike(node, child))) node = node.nextSibling;
  return node;
}

/** Return whether a node can be updated to match another; canvases are redrawn. */
const isAlike = (node, other) => node.nodeName === other.nodeName && node.nodeName !== "CANVAS" && node.nodeName !== "svg";

function update(node, other) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== other.data) node.data = other.data;
    return;
  }
  for (const { name } of [...node.attributes]) if (!other.hasAttribute(name) && name !== "style" && !isReaders(node, name)) node.removeAttribute(name);
  for (const { name, value } of other.attributes) {
    if (name !== "style" && !isReaders(node, name) && node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  if (node.style.cssText !== other.style.cssText) node.style.cssText = other.style.cssText; // the security policy forbids the style attribute
  for (const name of HANDLERS) node[name] = other[name];
  match(node, other);
}

/** Attributes that the reader changes, not the data. */
const isReaders = (node, name) => name === "open" && node.nodeName === "DETAILS";

export const percent = (ratio) => (ratio === null || ratio === undefined ? "unknown" : `${Math.round(ratio * 100)} %`);

const WHOLE = new Intl.NumberFormat("en-GB");
export const count = (number) => WHOLE.format(number);

export function bytes(value) {
  if (value === null || value === undefined) return "unknown";
  const gib = value / 2 ** 30;
  return `${gib >= 100 ? Math.round(gib) : gib.toFixed(1)} GiB`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function clock(at) {
  const date = at instanceof Date ? at : new Date(at);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleTimeString("en-GB");
}

const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** Format a time, with the day unless it is today. */
export function moment(at) {
  const date = new Date(at);
  return date.toDateString() === new Date().toDateString() ? clock(date) : `${DAY.format(date)}, ${clock(date)}`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Wrap a function so that it runs at most once per animation frame. */
export function oncePerFrame(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      work();
    });
  };
}
