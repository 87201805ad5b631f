// Pods that hold GPUs without using all of them, with costs if a price list is set. The sums come
// from the API and cover all pods, not only the listed ones.

import { bytes, count, duration, h, plural, renew, show } from "./dom.js";
import { grid, num } from "./grid.js";
import { LatestRequest } from "./requests.js";
import { RefreshedView } from "./refresh_timer.js";
import { go, state } from "./url.js";

const GAP_MS = 15000;
const MOST = 300;
const MONEY = new Intl.NumberFormat("en-GB", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const TIMES = [[0, "all holders"], [300, "5 min"], [900, "15 min"], [3600, "1 h"], [21600, "6 h"], [86400, "1 d"]];
const WAYS = ["pod", "owner", "namespace"];

export class Holders extends RefreshedView {
  constructor(box) {
    super(GAP_MS);
    Object.assign(this, { box, request: new LatestRequest(), held: new LatestRequest() });
    this.note = h("p", { class: "muted", role: "status" }, "Loading");
    this.body = h("div", { class: "wide" });
    this.idle = h("select", { onchange: () => go({ idle: this.idle.value }) }, TIMES.map(([seconds, name]) => h("option", { value: String(seconds) }, name)));
    this.by = h("select", { onchange: () => go({ by: this.by.value }) }, WAYS.map((name) => h("option", { value: name }, name)));
    show(box, h("div", { class: "bar" }, h("h2", {}, "Idle holders"), h("label", {}, "Idle for ", this.idle), h("label", {}, "By ", this.by), this.note), this.body);
  }

  setShown(isShown) {
    super.setShown(isShown);
    if (!isShown) this.held.drop(); // the reader has left the view
  }

  urlChanged(now, before) {
    if (now.idle !== before.idle || now.by !== before.by) this.refresh();
    else if (now.order !== before.order) this.show?.();
  }

  refresh() {
    if (!this.isShown) return;
    this.refreshTimer.note();
    const by = WAYS.includes(state.by) ? state.by : "pod";
    const { idle } = state;
    this.idle.value = idle;
    this.by.value = by;
    const query = `idle_for=${encodeURIComponent(idle)}&some=true&limit=${MOST}`;
    this.request.send(by === "pod" ? `holders?${query}` : `costs?by=${by}&${query}`, (answer) => this.render(by, answer), ({ message }) => {
      show(this.note, message);
      this.refreshTimer.isChanged();
    });
  }

  render(by, answer) {
    const rows = by === "pod" ? answer.holders : answer.costs;
    show(this.note, inWords(answer, rows));
    this.show = () => renew(this.body, !rows.length ? null : by === "pod" ? pods(answer, (one) => this.open(one)) : sums(by, answer));
    this.show();
  }

  /** Open the pod's longest-idle device. */
  open({ node, devices }) {
    openDevice(this.held, node, devices.reduce((one, other) => (other.idle_seconds > one.idle_seconds ? other : one), devices[0]));
  }
}

/** Open a node at one of its devices; the node's record has the device's position. */
export function openDevice(request, node, device) {
  const openAt = (gpu) => go({ view: "fleet", node, gpu: String(Math.max(gpu, 0)) }, true);
  request.drop();
  request.send(`page/nodes/${encodeURIComponent(node)}`,
    ({ gpus }) => openAt(gpus.findIndex((gpu) => gpu.uuid === device?.uuid && gpu.gpu_instance_id === device.gpu_instance_id)),
    () => openAt(0)); // the node's view shows the error
}

/** Render the sums, and what they leave out. */
function inWords(answer, rows) {
  const { sums: all } = answer;
  const inPart = answer.holders?.filter(isInPart).length;
  const hidden = answer.hidden_pods ?? answer.total - all.pods;
  const parts = [all.pods ? `${plural(all.pods, "pod")}: ${hours(all.gpu_hours)} GPU-hours, ${hours(all.gpu_hours_idle)} of them idle` : "No pod is known to hold GPUs that were idle for so long"];
  if (inPart) parts.push(`${inPart === 1 ? "1 of those listed uses some of its GPUs" : `${count(inPart)} of those listed use some of their GPUs`}`);
  if (all.cost !== null) parts.push(`cost ${MONEY.format(all.cost_used)} used, ${MONEY.format(all.cost_idle)} idle`);
  if (answer.is_priced && all.unpriced_pods) parts.push(`${plural(all.unpriced_pods, "pod")} without a price`);
  if (hidden) parts.push(`${plural(hidden, "pod")} of others not counted`);
  if (answer.unknown) parts.push(`the GPUs of ${plural(answer.unknown, "pod")} are unknown`);
  if (rows.length < answer.total) parts.push(`the first ${count(rows.length)} of ${count(answer.total)} are listed`);
  return parts.join("; ");
}

const idleOf = (one) => one.gpus_idle + one.mig_instances_idle;
const isInPart = (one) => idleOf(one) > 0 && idleOf(one) < one.gpus + one.mig_instances;

/** Format how many GPUs, and how many MIG instances, are idle. */
const idleInWords = (one) => [one.gpus ? `${count(one.gpus_idle)} of ${count(one.gpus)}` : null, one.mig_instances ? `MIG ${count(one.mig_instances_idle)} of ${count(one.mig_instances)}` : null].filter(Boolean).join(", ");

/** Format how many of its devices a pod uses. */
const usedInWords = (one) => [one.gpus ? `${count(one.gpus_in_use)} of ${plural(one.gpus, "GPU")}` : null, one.mig_instances ? `${count(one.mig_instances_in_use)} of ${plural(one.mig_instances, "MIG instance")}` : null].filter(Boolean).join(" and ");

const COSTS = ["Cost used", "Cost idle"];

/** Values to sort each column by: the largest number first, or words in the order of the alphabet. */
const ORDERS = {
  Pod: (one) => one.pod, Owner: (one) => one.owner ?? "", Node: (one) => one.node, Namespace: (one) => one.namespace,
  Pods: (one) => one.pods, "GPUs idle": idleOf, "Idle for": (one) => (idleOf(one) ? one.idle_seconds : -1),
  Held: (one) => one.held_seconds, "GPU-hours": (one) => one.gpu_hours, "of them idle": (one) => one.gpu_hours_idle,
  "Cost used": (one) => one.cost_used ?? -1, "Cost idle": (one) => one.cost_idle ?? -1,
};

/** Sort by the column that the reader chose, else keep the order of the API. */
function sorted(list) {
  const value = ORDERS[state.order];
  if (!value) return list;
  const direction = NUMBERS.has(state.order) ? -1 : 1;
  return [...list].sort((one, other) => direction * (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0));
}

function pods({ holders: listed, is_priced: isPriced }, open) {
  const holders = sorted(listed);
  const names = ["Pod", "Owner", "Node", "GPUs idle", "Idle for", "Held", "GPU-hours", "of them idle", ...(isPriced ? COSTS : []), "Why"];
  return grid(names, holders.map((one) => one.uid), holders.map((one) => [
    h("th", { scope: "row" }, one.pod, isInPart(one) ? [" ", h("span", { class: "state" }, `uses ${usedInWords(one)}`)] : null), one.owner ?? "",
    h("button", { type: "button", class: "link", onclick: () => open(one) }, one.node),
    num(idleInWords(one)), num(idleOf(one) ? `${one.is_at_least ? "≥ " : ""}${duration(one.idle_seconds)}` : "in use"), num(duration(one.held_seconds)), num(hours(one.gpu_hours)), num(hours(one.gpu_hours_idle)),
    ...(isPriced ? [num(money(one.cost_used)), num(money(one.cost_idle))] : []),
    h("td", { class: "why-cell" }, one.why, one.memory_used_bytes && !one.why.includes("memory") ? `, ${bytes(one.memory_used_bytes)} of memory held` : ""),
  ]), COLUMNS);
}

function sums(by, { costs: listed, is_priced: isPriced }) {
  const costs = sorted(listed);
  const names = [by === "owner" ? "Owner" : "Namespace", "Pods", "GPUs idle", "GPU-hours", "of them idle", ...(isPriced ? COSTS : [])];
  const called = costs.map((one) => (by === "owner" ? `${one.namespace}/${one.owner ?? "no owner"}` : one.namespace));
  return grid(names, called, costs.map((one, at) => [
    h("th", { scope: "row" }, called[at]),
    num(count(one.pods)), num(idleInWords(one)), num(hours(one.gpu_hours)), num(hours(one.gpu_hours_idle)),
    ...(isPriced ? [num(money(one.cost_used)), num(money(one.cost_idle))] : []),
  ]), COLUMNS);
}

const TENTH = new Intl.NumberFormat("en-GB", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const hours = (value) => TENTH.format(value);
const money = (amount) => (amount === null ? "" : MONEY.format(amount));
const NUMBERS = new Set(["Idle for", "Held", "GPU-hours", "of them idle", "Pods", "GPUs idle", ...COSTS]);
const COLUMNS = { orders: new Set(Object.keys(ORDERS)), largest: NUMBERS, right: NUMBERS };
