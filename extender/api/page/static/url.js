// The state of the view is in the URL, so that it can be shared.

const DEFAULTS = {
  view: "fleet", q: "", group: "model", color: "activity", look: "", model: "", sort: "name",
  node: "", gpu: "", zoom: "", as: "map", theme: "", by: "pod", decision: "", idle: "3600", order: "",
  find: "", namespace: "", pods: "", from: "",
};
const listeners = new Set();

export const state = read();

function read() {
  const query = new URLSearchParams(location.search);
  const values = {};
  for (const [name, value] of Object.entries(DEFAULTS)) values[name] = query.get(name) ?? value;
  return values;
}

/** Change the view's state; with `isStep` the Back button undoes it. */
export function go(change, isStep = false) {
  const before = { ...state };
  Object.assign(state, change);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (state[name] !== value) query.set(name, state[name]);
  }
  const text = query.toString();
  const url = text ? `?${text}` : location.pathname;
  if (isStep) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
  notify(before);
}

export function onChange(listener) {
  listeners.add(listener);
}

function notify(before) {
  for (const listener of listeners) listener(state, before);
}

addEventListener("popstate", () => {
  const before = { ...state };
  Object.assign(state, read());
  notify(before);
});
