// Side panel with the details of a node and one of its GPUs.

import { FULL, KINDS, kindOf } from "./fleet.js";
import { meter } from "./fleet_view.js";
import { signCanvas } from "./paint.js";
import { plot } from "./plot.js";
import { processes } from "./processes.js";
import { LatestRequest } from "./requests.js";
import { RefreshTimer } from "./refresh_timer.js";
import { inUnit, nameOfSignal } from "./signals.js";
import { bytes, clean, count, duration, h, percent, plural, renew } from "./dom.js";
import { go, state } from "./url.js";

const GAP_MS = 1500, LONGEST_MS = 5000, PAST_MS = 60000;

export class Detail {
  constructor(box, fleet, view) {
    Object.assign(this, { box, fleet, view, node: "", document: null, past: null, error: "", pastError: "", now: new LatestRequest(), before: new LatestRequest() });
    this.refreshTimer = new RefreshTimer(() => this.load(), GAP_MS, LONGEST_MS);
  }

  urlChanged(now, before) {
    if (now.node !== before.node) this.open(now.node);
    else if (now.node && now.gpu !== before.gpu) this.render();
  }

  open(node) {
    const isOpened = node && !this.node;
    this.node = node;
    this.document = this.past = null;
    this.error = this.pastError = "";
    this.box.hidden = !node;
    document.documentElement.toggleAttribute("data-detail", Boolean(node));
    this.now.drop();
    this.before.drop();
    if (!node) return;
    this.render();
    this.load();
    if (isOpened && document.activeElement !== this.view.map.canvas) this.box.focus({ preventScroll: true });
  }

  close() {
    const isInside = this.box.contains(document.activeElement);
    go({ node: "", gpu: "" }, true);
    if (isInside) this.view.map.canvas.focus();
  }

  /** Something may have changed here: fetch again, at a limited rate. */
  isChanged() {
    this.refreshTimer.isChanged();
  }

  load() {
    if (!this.node) return;
    const name = encodeURIComponent(this.node);
    const inWords = ({ status, message }) => (status === 404 ? "This node is not known any more." : message);
    this.refreshTimer.note();
    this.now.send(`page/nodes/${name}`, (document) => {
      this.document = document;
      this.error = "";
      this.render();
      if (this.before.isUnderWay || (this.past && Date.now() - this.past.loadedAt <= PAST_MS)) return;
      this.before.send(`page/past/${name}`, (past) => {
        this.past = { ...past, loadedAt: Date.now() };
        this.pastError = "";
        this.render();
      }, (failure) => {
        this.pastError = inWords(failure);
        this.render();
      });
    }, (failure) => {
      this.error = inWords(failure);
      this.render();
    });
  }

  render() {
    const error = this.error || this.pastError;
    renew(this.box,
      h("header", { class: "detail-head" }, h("h2", {}, this.node), h("button", { type: "button", class: "plain", "aria-label": "Close", title: "Close (Esc)", onclick: () => this.close() }, "✕")),
      error ? h("p", { class: "trouble" }, error) : null,
      this.document ? this.body() : error ? null : h("p", { class: "muted" }, "Loading"));
  }

  body() {
    const node = this.document;
    const picked = Math.min(Number(state.gpu) || 0, node.gpus.length - 1);
    return [this.summary(node), node.gpus.length ? this.list(node, picked) : null, node.gpus.length ? this.gpu(node.gpus[picked], picked) : null, this.pods(node)];
  }

  summary(node) {
    const status = [node.is_ready ? "ready" : "not ready", node.is_unschedulable ? "cordoned" : null].filter(Boolean).join(", ");
    const resources = Object.entries(node.resources).map(([name, one]) => `${name}: ${one.held} of ${one.allocatable} held${one.assumed ? `, ${one.assumed} assumed` : ""}${one.capacity > one.allocatable ? `, ${one.capacity - one.allocatable} not offered` : ""}`);
    const zone = node.labels["topology.kubernetes.io/zone"];
    return h("dl", { class: "facts" },
      fact("Model", node.model || "unknown"), fact("Node", status), node.driver_version ? fact("Driver", node.driver_version) : null, zone ? fact("Zone", zone) : null,
      resources.map((text) => fact("GPUs", text)),
      node.early_failures ? fact("Early failures", `pods of ${plural(node.early_failures, "owner")} failed soon after their start, which counts against the node`) : null,
      node.taints.length ? fact("Taints", node.taints.map((taint) => `${taint.key}${taint.value ? `=${taint.value}` : ""}:${taint.effect}`).join(", ")) : null);
  }

  list(node, picked) {
    const start = this.fleet.names.indexOf(this.node);
    const first = start < 0 ? -1 : this.fleet.nodeStart[start];
    const heads = h("div", { class: "gpu-row heads", "aria-hidden": "true" }, h("span", {}), h("span", {}), h("span", {}, "activity"), h("span", {}), h("span", {}, "memory"), h("span", {}));
    return [heads, h("ul", { class: "gpus", "aria-label": "GPUs of this node" }, node.gpus.map((gpu, at) => {
      const device = first < 0 ? -1 : first + at; // same order as in the map
      const fleetState = device >= 0 && device < this.fleet.size ? this.fleet.state[device] : 3;
      return h("li", {}, h("button", { type: "button", class: "gpu-row", "aria-pressed": String(at === picked), onclick: () => go({ gpu: String(at) }) },
        signCanvas(this.view.paint, fleetState, gpu.utilization_latest_ratio === null ? 255 : gpu.utilization_latest_ratio * FULL, 14),
        h("span", { class: "gpu-name" }, nameOf(gpu)),
        meter(gpu.utilization_latest_ratio, this.fleet.thresholds.utilization), h("span", { class: "num" }, gpu.utilization_latest_ratio === null ? "?" : `${Math.round(gpu.utilization_latest_ratio * 100)} %`),
        meter(gpu.memory_used_ratio, this.fleet.thresholds.memory), h("span", { class: "num" }, gpu.memory_used_ratio === null ? "?" : bytes(gpu.memory_used_ratio * gpu.memory_total_bytes))));
    }))];
  }

  gpu(gpu, at) {
    const kind = gpu.state;
    return h("section", { class: "gpu", "aria-label": nameOf(gpu) },
      h("h3", {}, nameOf(gpu), h("span", { class: `state ${kind}` }, kind)),
      h("p", { class: "why" }, gpu.why),
      gpu.health && gpu.health !== gpu.why ? h("p", { class: "trouble" }, gpu.health) : null,
      this.plots(gpu, at),
      h("dl", { class: "facts" },
        fact("Activity", `${percent(gpu.utilization_latest_ratio)} now, ${percent(gpu.utilization_ratio)} on average`),
        gpu.utilization_next_hour_ratio === null ? null : fact("Next hour", nextHour(gpu).words),
        fact("Memory", gpu.memory_used_ratio === null ? "unknown" : `${bytes(gpu.memory_used_ratio * gpu.memory_total_bytes)} of ${bytes(gpu.memory_total_bytes)}, ${bytes(gpu.memory_free_bytes)} free`),
        gpu.power_watts !== null ? fact("Power", `${Math.round(gpu.power_watts)} W`) : null,
        gpu.temperature_celsius !== null ? fact("Temperature", `${Math.round(gpu.temperature_celsius)} °C`) : null,
        fact("Throttling", gpu.throttling === null ? "unknown" : gpu.throttling.length ? gpu.throttling.join(", ") : "none"),
        fact("Health", gpu.health || (gpu.xid ? `last XID ${gpu.xid}` : "no problem known")),
        gpu.replicas > 1 ? fact("Shares", `${gpu.replicas_used} of ${gpu.replicas} in use`) : null,
        gpu.assumed ? fact("Just placed", `${plural(gpu.assumed, "pod")} that the readings do not show yet`) : null,
        fact("Tenants", gpu.tenants.length ? gpu.tenants.join(", ") : "none seen"),
        gpu.foreign_processes?.length ? fact("Foreign use", processes(gpu)) : null,
        fact("Measured", gpu.age_seconds === null ? "never" : `${duration(gpu.age_seconds)} ago by ${gpu.source} (${gpu.freshness === "missing" ? "unknown" : gpu.freshness})`),
        fact("Resource", gpu.resource), gpu.uuid ? fact("UUID", gpu.gpu_instance_id ? `${gpu.uuid}, instance ${gpu.gpu_instance_id}` : gpu.uuid) : null),
      h("table", { class: "grid small" }, h("caption", {}, "Readings"),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Signal"), h("th", { scope: "col", class: "num" }, "Value"), h("th", { scope: "col" }, "Source"), h("th", { scope: "col", class: "num" }, "Age"))),
        h("tbody", {}, gpu.readings.map((one) => h("tr", {}, h("th", { scope: "row" }, nameOfSignal(one.signal)), h("td", { class: "num" }, inUnit(one.signal, one.value)), h("td", {}, one.source), h("td", { class: "num" }, duration(one.age_seconds)))))));
  }

  plots(gpu, at) {
    if (!this.past) return null;
    const { times, series, source, note } = this.past;
    return h("div", { class: "plots" },
      plot("activity", times, series.activity?.[at] ?? [], nextHour(gpu)), plot("memory", times, series.memory?.[at] ?? []),
      h("p", { class: "muted" }, source === "prometheus" ? "The last hour, from Prometheus" : "The last hour, as far as this extender has run", note ? `. ${note}` : ""));
  }

  pods(node) {
    return h("section", {}, h("h3", {}, `Pods with GPUs (${count(node.pods.length)})`), node.pods.length ? h("ul", { class: "pods" }, node.pods.map((pod) => h("li", {}, pod))) : h("p", { class: "muted" }, "none"));
  }
}

/** Return the expected activity of the next hour with its interval, in ratios and words; null if it is unknown. */
function nextHour(gpu) {
  const { utilization_next_hour_ratio: about, utilization_next_hour_low_ratio: low, utilization_next_hour_high_ratio: high } = gpu;
  return about === null ? null : { low, high, words: `about ${percent(about)} (${Math.round(low * 100)} to ${percent(high)})` };
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

export const nameOf = (gpu) => `${gpu.index === null ? "GPU" : `GPU ${gpu.index}`}${gpu.mig_profile ? ` ${clean(gpu.mig_profile)}` : ""}`;

export { KINDS, kindOf };
