// The reader's pods with their GPUs, use and waits, one page at a time; the API searches, sorts and counts.

import { bytes, clean, count, duration, h, percent, plural, renew, show } from "./dom.js";
import { meter } from "./fleet_view.js";
import { grid, num } from "./grid.js";
import { openDevice } from "./holders.js";
import { reasonOf } from "./pending.js";
import { LatestRequest } from "./requests.js";
import { RefreshedView } from "./refresh_timer.js";
import { go, state } from "./url.js";

const GAP_MS = 10000, TYPING_MS = 250;
const PAGE = 100;
const STARTING_SECONDS = 120; // the API counts no shorter time as idle
const KINDS = [["", "all"], ["holds", "with GPUs"], ["waits", "waiting"]];
/** The API's name of each column's order. */
const SORTS = { Pod: "pod", Owner: "owner", Node: "node", GPUs: "gpus", Use: "use", Memory: "memory", "Idle for": "idle", Waits: "wait" };
const NAMES = ["Pod", "Owner", "Node", "GPUs", "Use", "Memory", "Idle for", "Waits", "Why it waits"];
const NUMBERS = ["Use", "Memory", "Idle for", "Waits"];
const COLUMNS = { orders: new Set(Object.keys(SORTS)), largest: new Set(["GPUs", ...NUMBERS]), right: new Set(NUMBERS) };
const PARAMETERS = ["find", "namespace", "pods", "from", "order"];

export class Pods extends RefreshedView {
  constructor(box) {
    super(GAP_MS);
    Object.assign(this, { box, request: new LatestRequest(), node: new LatestRequest() });
    this.note = h("p", { class: "muted", role: "status" }, "Loading");
    this.body = h("div", { class: "wide" });
    this.pages = h("div", { class: "row pages" });
    this.search = h("input", { type: "search", placeholder: "Pod, owner or node", "aria-label": "Show pods by name, owner or node", oninput: () => this.isTyped() });
    this.namespace = h("select", { onchange: () => go({ namespace: this.namespace.value, from: "" }) });
    this.kind = h("select", { onchange: () => go({ pods: this.kind.value, from: "" }) }, KINDS.map(([kind, name]) => h("option", { value: kind }, name)));
    show(box, h("div", { class: "bar" }, h("h2", {}, "Pods"), this.search, h("label", {}, "Namespace ", this.namespace), h("label", {}, "Show ", this.kind), this.note), this.body, this.pages);
  }

  setShown(isShown) {
    super.setShown(isShown);
    if (!isShown) this.node.drop(); // the reader has left the view
  }

  urlChanged(now, before) {
    if (PARAMETERS.some((name) => now[name] !== before[name])) this.refresh();
  }

  /** Send a request once the reader pauses: each request reads all pods. */
  isTyped() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => go({ find: this.search.value, from: "" }), TYPING_MS);
  }

  refresh() {
    if (!this.isShown) return;
    this.refreshTimer.note();
    if (document.activeElement !== this.search) this.search.value = state.find;
    this.kind.value = state.pods;
    const query = new URLSearchParams({ limit: PAGE });
    const wanted = { search: state.find.slice(0, 200), namespace: state.namespace, state: state.pods, sort: SORTS[state.order], offset: Number(state.from) || 0 };
    for (const [name, value] of Object.entries(wanted)) if (value) query.set(name, value);
    this.request.send(`pods?${query}`, (answer) => this.render(answer), ({ message }) => {
      show(this.note, message);
      this.refreshTimer.isChanged();
    });
  }

  render(answer) {
    const { pods, total, offset, namespaces } = answer;
    if (offset && !pods.length && total) return go({ from: "" }); // the page is gone
    const names = state.namespace && !namespaces.includes(state.namespace) ? [state.namespace, ...namespaces] : namespaces;
    renew(this.namespace, h("option", { value: "" }, "all"), names.map((name) => h("option", { value: name }, name)));
    this.namespace.value = state.namespace;
    show(this.note, inWords(answer));
    renew(this.body, pods.length ? grid(NAMES, pods.map((one) => one.uid), pods.map((one) => this.row(one)), COLUMNS) : h("p", { class: "group-name" }, "No pod with GPUs matches."));
    const page = (name, from, isThere) => h("button", { type: "button", disabled: !isThere, onclick: () => { go({ from: from ? String(from) : "" }, true); this.body.scrollTop = 0; } }, name);
    this.pages.hidden = total <= PAGE;
    renew(this.pages, total > PAGE ? [page("Previous", Math.max(offset - PAGE, 0), offset > 0), page("Next", offset + PAGE, offset + pods.length < total)] : null);
  }

  row(pod) {
    const { wait } = pod;
    return [
      h("th", { scope: "row" }, pod.pod, pod.is_deleting ? [" ", h("span", { class: "state" }, "is being deleted")] : null),
      pod.owner ?? "",
      pod.node ? h("button", { type: "button", class: "link", onclick: () => openDevice(this.node, pod.node, pod.devices[0]) }, pod.node) : "",
      h("td", { class: "pod-gpus" }, gpus(pod)),
      num(wait ? "" : use(pod)), num(wait ? "" : memory(pod)), num(wait ? "" : idle(pod)),
      num(wait ? duration(wait.waiting_seconds) : ""), h("td", { class: "why-cell" }, wait ? reasonOf(wait) : ""),
    ];
  }
}

function inWords({ pods, total, offset, holds, waits, unreachable }) {
  const parts = [total ? `${plural(holds, "pod")} with GPUs, ${count(waits)} waiting` : ""];
  if (pods.length < total) parts.push(`${count(offset + 1)} to ${count(offset + pods.length)} of ${count(total)} are shown`);
  if (unreachable.length) parts.push(`without ${plural(unreachable.length, "replica")} that did not answer`);
  return parts.filter(Boolean).join("; ");
}

/** Name a pod's devices: GPUs with neighbouring numbers together, then shares and MIG instances. */
function gpus(pod) {
  if (pod.wait) return Object.entries(pod.resources).map(([name, number]) => `${number} ${name}`).join(", ") || "by ResourceClaims";
  const whole = pod.devices.filter((one) => !one.mig_profile && one.shares === 1 && one.index !== null).map((one) => one.index).sort((one, other) => one - other);
  const parts = whole.length ? [`${whole.length > 1 ? "GPUs" : "GPU"} ${ranges(whole)}`] : [];
  for (const one of pod.devices) {
    const name = one.index === null ? "a GPU" : `GPU ${one.index}`;
    if (one.mig_profile) parts.push(`${name} ${clean(one.mig_profile)}`);
    else if (one.shares > 1) parts.push(`share of ${name} (of ${one.shares})`);
    else if (one.index === null) parts.push(name);
  }
  if (pod.gpus_unknown) parts.push(`${count(pod.gpus_unknown)} unknown`);
  return [parts.join(", "), pod.model ? h("span", { class: "muted" }, ` · ${pod.model}`) : null];
}

/** Format sorted numbers, such as 0–3, 5. */
function ranges(numbers) {
  const runs = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? String(first) : `${first}–${last}`)).join(", ");
}

function use(pod) {
  const ratio = pod.utilization_ratio;
  const isShared = pod.devices.some((one) => one.tenants > 1);
  return h("span", { class: "pod-use", title: isShared ? "of the GPU that it shares with other pods" : null }, meter(ratio), percent(ratio));
}

function memory({ memory_used_bytes: used, memory_declared_bytes: declared }) {
  if (declared === null || declared === undefined) return bytes(used);
  const text = `${used === null ? "?" : bytes(used).replace(" GiB", "")} of ${bytes(declared)}`;
  return used > declared ? h("span", { class: "trouble", title: "more than it declared" }, text) : text;
}

function idle(pod) {
  if (pod.gpus_idle === null) return "unknown";
  if (!pod.gpus_idle) return pod.held_seconds < STARTING_SECONDS ? "just placed" : "in use";
  const part = pod.gpus_idle < pod.gpus ? ` (${count(pod.gpus_idle)} of ${count(pod.gpus)})` : "";
  return `${pod.is_at_least ? "≥ " : ""}${duration(pod.idle_seconds)}${part}`;
}
