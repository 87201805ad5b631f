// Pods that hold GPUs and do not use them; what that costs where a price list is set.

import { AnswerError, ask } from "./feed.js";
import { bytes, count, duration, h, plural, show } from "./dom.js";
import { go, onChange, state } from "./url.js";

const AGAIN_MS = 15000;
const MONEY = new Intl.NumberFormat("en-GB", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const TIMES = [[0, "all holders"], [300, "5 min"], [900, "15 min"], [3600, "1 h"], [21600, "6 h"], [86400, "1 d"]];

export class Holders {
  constructor(box, fleet) {
    Object.assign(this, { box, fleet, isShown: false, told: null });
    this.note = h("p", { class: "muted", role: "status" }, "Loading");
    this.body = h("div", { class: "wide" });
    this.idle = h("select", { onchange: () => go({ idle: this.idle.value }) }, TIMES.map(([seconds, name]) => h("option", { value: String(seconds) }, name)));
    this.by = h("select", { onchange: () => go({ by: this.by.value }) }, ["pod", "owner", "namespace"].map((name) => h("option", { value: name }, name)));
    show(box, h("div", { class: "bar" }, h("h2", {}, "Idle holders"), h("label", {}, "Idle for ", this.idle), h("label", {}, "By ", this.by), this.note), this.body);
    onChange((now, before) => {
      if (now.idle !== before.idle) this.refresh();
      if (now.by !== before.by) this.render();
    });
    setInterval(() => this.isShown && !document.hidden && this.refresh(), AGAIN_MS);
  }

  setShown(isShown) {
    this.isShown = isShown;
    if (isShown) this.refresh();
  }

  async refresh() {
    if (!this.isShown) return;
    this.idle.value = state.idle;
    this.by.value = state.by;
    try {
      this.told = await ask(`holders?idle_for=${encodeURIComponent(state.idle)}&limit=1000`);
      this.render();
    } catch (error) {
      if (!(error instanceof AnswerError)) throw error;
      show(this.note, error.message);
    }
  }

  /** The fleet, whose models and prices make the costs, may come after the holders. */
  isPriced() {
    if (this.isShown) this.render();
  }

  render() {
    if (!this.told || this.body.contains(document.activeElement)) return;
    const { told } = this;
    const sums = told.holders.reduce((sum, one) => sum + one.gpu_hours_idle, 0);
    show(this.note, told.holders.length ? `${plural(told.total, "pod")}, ${hours(sums)} idle so far${told.unknown ? `; of ${plural(told.unknown, "pod")} nobody knows` : ""}` : `No pod holds GPUs that were idle for so long${told.unknown ? `; of ${plural(told.unknown, "pod")} nobody knows` : ""}.`);
    if (!told.holders.length) return show(this.body);
    const hasCost = told.holders.some((one) => this.price(one) !== null);
    show(this.body, state.by === "pod" ? this.pods(told.holders, hasCost) : this.sums(told.holders, hasCost));
  }

  /** Price of a GPU-hour of what a pod holds, null where it is not set. */
  price(holder) {
    const { fleet } = this;
    const node = fleet.names.indexOf(holder.node);
    if (node < 0) return null;
    const model = fleet.modelOf(node).toLowerCase();
    let best = null;
    for (const [words, price] of Object.entries(fleet.prices)) {
      if (words.toLowerCase().split(/\s+/).every((word) => model.includes(word)) && (!best || words.length > best.words.length)) best = { words, price };
    }
    return best ? best.price : null;
  }

  pods(holders, hasCost) {
    return table(["Pod", "Owner", "Node", "GPUs idle", "Idle for", "Held", "GPU-hours", "of them idle", ...(hasCost ? ["Cost", "of it idle"] : []), "Why"], holders.map((one) => {
      const price = this.price(one);
      return [
        h("th", { scope: "row" }, one.pod), one.owner ?? "", h("button", { type: "button", class: "link", onclick: () => go({ view: "fleet", node: one.node, gpu: String(one.devices[0]?.index ?? 0) }, true) }, one.node),
        num(`${one.gpus_idle} of ${one.gpus}`), num(one.idle_seconds ? `${one.is_at_least ? "≥ " : ""}${duration(one.idle_seconds)}` : "in use"), num(duration(one.held_seconds)), num(one.gpu_hours.toFixed(1)), num(one.gpu_hours_idle.toFixed(1)),
        ...(hasCost ? [num(money(price, one.gpu_hours)), num(money(price, one.gpu_hours_idle))] : []),
        h("td", { class: "why-cell" }, one.why, one.memory_used_bytes && !one.why.includes("memory") ? `, ${bytes(one.memory_used_bytes)} of memory held` : ""),
      ];
    }));
  }

  sums(holders, hasCost) {
    const groups = new Map();
    for (const one of holders) {
      const namespace = one.pod.includes("/") ? one.pod.split("/")[0] : "";
      const name = state.by === "namespace" ? namespace || "another namespace" : `${namespace}${namespace ? "/" : ""}${one.owner || "no owner"}`;
      const sum = groups.get(name) ?? { name, pods: 0, gpus: 0, idle: 0, hours: 0, idleHours: 0, cost: 0, idleCost: 0 };
      const price = this.price(one) ?? 0;
      sum.pods++;
      sum.gpus += one.gpus;
      sum.idle += one.gpus_idle;
      sum.hours += one.gpu_hours;
      sum.idleHours += one.gpu_hours_idle;
      sum.cost += price * one.gpu_hours;
      sum.idleCost += price * one.gpu_hours_idle;
      groups.set(name, sum);
    }
    const sorted = [...groups.values()].sort((a, b) => b.idleHours - a.idleHours);
    return table([state.by === "owner" ? "Owner" : "Namespace", "Pods", "GPUs idle", "GPU-hours", "of them idle", ...(hasCost ? ["Cost", "of it idle"] : [])], sorted.map((sum) => [
      h("th", { scope: "row" }, sum.name), num(count(sum.pods)), num(`${count(sum.idle)} of ${count(sum.gpus)}`), num(sum.hours.toFixed(1)), num(sum.idleHours.toFixed(1)),
      ...(hasCost ? [num(MONEY.format(sum.cost)), num(MONEY.format(sum.idleCost))] : []),
    ]));
  }
}

const hours = (value) => `${value.toFixed(1)} GPU-hours`;
const money = (price, time) => (price === null ? "" : MONEY.format(price * time));
const num = (text) => h("td", { class: "num" }, text);
const NUMBERS = new Set(["GPUs", "Idle for", "Held", "GPU-hours", "of them idle", "Cost", "of it idle", "Pods", "GPUs idle"]);

function table(names, rows) {
  return h("table", { class: "grid" }, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col", class: NUMBERS.has(name) ? "num" : null }, name)))), h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell)))))));
}
