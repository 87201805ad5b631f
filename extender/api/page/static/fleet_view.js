// Fleet view: search, filters, options, and the fleet as a map or a table.

import { FULL, KINDS, NO_VALUE, kindOf } from "./fleet.js";
import { FleetMap } from "./map.js";
import { Paint, signCanvas } from "./paint.js";
import { processes } from "./processes.js";
import { FleetTable } from "./table.js";
import { LatestRequest } from "./requests.js";
import { byId, clean, count, h, oncePerFrame, plural, show } from "./dom.js";
import { go, state } from "./url.js";

const LABEL_NAMES = {
  "topology.kubernetes.io/zone": "zone",
  "node.kubernetes.io/instance-type": "instance type",
  "cloud.google.com/gke-nodepool": "node pool (GKE)",
  "eks.amazonaws.com/nodegroup": "node group (EKS)",
  "karpenter.sh/nodepool": "node pool (Karpenter)",
  "kubernetes.azure.com/agentpool": "agent pool (AKS)",
  "node-role.kubernetes.io/": "role",
};
const ZOOM_ENDS_MS = 150, RESTS_MS = 200;
const MOST_PODS = 3, MOST_PROCESSES = 2;
const SAMPLE = [20, 0, 170, 120, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE];
const SAMPLE_STATE = [0, 8, 1, 2, 3, 4, 5, 6];

export class FleetView {
  constructor(fleet) {
    this.fleet = fleet;
    this.paint = new Paint(false);
    this.map = new FleetMap({
      scroller: byId("scroller"), canvas: byId("map"), spacer: byId("spacer"), fleet, paint: this.paint,
      on: {
        hover: (device, x, y) => this.tip(device, x, y),
        open: (device) => this.open(device),
        speak: (device) => show(byId("spoken"), this.inWords(device)),
        zoom: (zoom) => this.showZoom(zoom),
      },
    });
    this.table = new FleetTable(byId("table"), this);
    this.groups = [];
    this.reasons = { node: "", gpus: [], request: new LatestRequest() };
    this.recount = oncePerFrame(() => this.showCounts());
    this.bind();
  }

  bind() {
    byId("search").addEventListener("input", (event) => go({ q: event.target.value }));
    for (const id of ["color", "group", "model", "sort"]) byId(id).addEventListener("change", (event) => go({ [id]: event.target.value }));
    byId("zoom-in").addEventListener("click", () => this.map.step(1));
    byId("zoom-out").addEventListener("click", () => this.map.step(-1));
    byId("zoom-fit").addEventListener("click", () => this.map.setZoom(0));
    byId("as-table").addEventListener("click", () => go({ as: state.as === "table" ? "map" : "table" }));
    this.chips = KINDS.map((kind) => {
      const number = h("b", {}, "0");
      const chip = h("button", { type: "button", class: "chip", "aria-pressed": "false", title: kind.about, "data-kind": kind.id, onclick: () => this.toggle(kind.id) }, h("span", { class: "sign-box" }), h("span", { class: "chip-name" }, kind.name), number);
      return { chip, number };
    });
    show(byId("chips"), this.chips.map(({ chip }) => chip));
  }

  toggle(id) {
    const looks = new Set(state.look.split(",").filter(Boolean));
    if (!looks.delete(id)) looks.add(id);
    go({ look: KINDS.map((kind) => kind.id).filter((kind) => looks.has(kind)).join(",") });
  }

  get kinds() {
    const looks = new Set(state.look.split(","));
    return new Set(KINDS.map((kind, at) => (looks.has(kind.id) ? at : -1)).filter((at) => at >= 0));
  }

  setTheme(isDark) {
    this.paint = new Paint(isDark);
    this.paint.setColor(state.color === "memory" ? "memory" : "activity");
    this.map.paint = this.paint;
    this.showSigns();
    this.map.requestDraw();
  }

  showSigns() {
    this.chips.forEach(({ chip }, at) => chip.querySelector(".sign-box").replaceChildren(signCanvas(this.paint, SAMPLE_STATE[at], SAMPLE[at], 14)));
    const canvas = byId("ramp");
    canvas.width = 120;
    canvas.height = 8;
    const context = canvas.getContext("2d");
    for (let x = 0; x < 120; x++) {
      const [r, g, b] = this.paint.fill(Math.round((x / 119) * 20));
      context.fillStyle = `rgb(${r} ${g} ${b})`;
      context.fillRect(x, 0, 1, 8);
    }
    const limit = state.color === "memory" ? this.fleet.thresholds.memory : this.fleet.thresholds.utilization;
    show(byId("scale-name"), `${state.color === "memory" ? "memory in use" : "activity"} 0 to 100 %, idle below ${Math.round(limit * 100)} %`);
  }

  /** Write the zoom to the URL when it has ended: browsers limit the number of URL changes. */
  showZoom(zoom) {
    clearTimeout(this.zooming);
    this.zooming = setTimeout(() => go({ zoom: zoom ? String(zoom) : "" }), ZOOM_ENDS_MS);
  }

  /** Apply a change of the URL. */
  urlChanged(now, before) {
    const search = byId("search");
    if (search.value !== now.q) search.value = now.q;
    for (const id of ["color", "group", "model", "sort"]) byId(id).value = now[id];
    const kinds = this.kinds;
    this.chips.forEach(({ chip }, at) => chip.setAttribute("aria-pressed", String(kinds.has(at))));
    if (now.color !== before.color) {
      this.paint.setColor(now.color === "memory" ? "memory" : "activity");
      this.showSigns();
      this.map.requestDraw();
    }
    if (now.zoom !== before.zoom && now.zoom !== String(this.map.zoom || "")) this.map.setZoom(Number(now.zoom) || 0);
    if (now.as !== before.as) this.showAs();
    if (["q", "look", "model", "group", "sort"].some((name) => now[name] !== before[name])) this.choose();
    if (now.node !== before.node || now.gpu !== before.gpu) this.showPick();
  }

  showAs() {
    const isTable = state.as === "table";
    byId("as-table").setAttribute("aria-pressed", String(isTable));
    byId("scroller").hidden = isTable;
    byId("table").hidden = !isTable;
    for (const id of ["zoom-in", "zoom-out", "zoom-fit"]) byId(id).disabled = isTable;
    if (isTable) this.table.show();
    else this.map.resize();
  }

  /** Handle a change of devices or nodes. */
  isNew() {
    const { fleet } = this;
    const labels = Object.keys(fleet.labels).map((label) => h("option", { value: label }, LABEL_NAMES[label] ?? label));
    show(byId("group"), h("option", { value: "model" }, "model"), labels, h("option", { value: "none" }, "nothing"));
    show(byId("model"), h("option", { value: "" }, "all"), fleet.modelCounts().filter((model) => model.name).map((model) => h("option", { value: model.name }, `${clean(model.name)} (${count(model.cards)})`)));
    // Set the raw value: model names are compared, so they must not be sanitized here.
    byId("group").value = state.group;
    byId("model").value = state.model;
    this.showSigns();
    this.choose();
    this.showPick();
  }

  /** Handle a change of device states. */
  isChanged() {
    this.recount();
    this.map.requestDraw();
    if (state.as === "table") this.table.refresh();
  }

  isSeen() {
    this.map.resize();
    this.showCounts();
  }

  choose() {
    const { fleet } = this;
    const kinds = this.kinds;
    this.groups = fleet.select({ q: state.q, model: state.model, kinds, group: state.group, sort: state.sort });
    this.map.setGroups(this.groups, kinds);
    if (state.as === "table") this.table.show();
    this.showCounts();
  }

  showCounts() {
    const { fleet } = this;
    const counts = fleet.counts(), { kinds } = counts;
    const isKnown = fleet.version > 0; // until the first data arrive, no count is zero
    this.chips.forEach(({ chip, number }, at) => {
      number.textContent = isKnown ? count(kinds[at]) : "";
      chip.classList.toggle("none", kinds[at] === 0);
    });
    const nodes = this.groups.reduce((sum, group) => sum + group.nodes.length, 0);
    const all = fleet.names.length;
    const text = nodes === all ? `${plural(all, "node")}, ${fleet.sizeInWords(counts).join(", ")}` : `${count(nodes)} of ${plural(all, "node")}`;
    show(byId("totals"), isKnown ? text : "");
    byId("map").setAttribute("aria-label", !isKnown ? "Fleet map: no data yet" : `Fleet map: ${text}; ${KINDS.map((kind, at) => (kinds[at] ? `${count(kinds[at])} ${kind.name}` : "")).filter(Boolean).join(", ")}`);
    const empty = byId("empty");
    empty.hidden = nodes > 0;
    if (!empty.hidden) show(empty, h("p", {}, !isKnown ? "Connecting to the extender: no data yet." : all ? "No node matches." : "No node with GPUs is known yet."), all ? h("button", { type: "button", onclick: () => go({ q: "", look: "", model: "" }) }, "Show all nodes") : null);
  }

  showPick() {
    const { fleet } = this;
    const node = state.node ? fleet.names.indexOf(state.node) : -1;
    if (node < 0) return this.map.pick(-1);
    const device = Math.min(fleet.nodeStart[node] + (Number(state.gpu) || 0), fleet.nodeStart[node + 1] - 1);
    this.map.pick(device);
  }

  open(device) {
    const node = this.fleet.nodeOf[device];
    go({ node: this.fleet.names[node], gpu: String(device - this.fleet.nodeStart[node]) }, !state.node);
  }

  /** Describe a device in words, for the tooltip and screen readers. */
  inWords(device) {
    const { fleet } = this;
    const node = fleet.nodeOf[device];
    const value = (byte) => (byte === NO_VALUE ? "unknown" : `${Math.round((byte / FULL) * 100)} %`);
    const shares = fleet.replicas[device] > 1 ? `, ${fleet.used[device]} of ${fleet.replicas[device]} shares in use` : "";
    return `${clean(fleet.names[node])}, ${this.nameOf(device)}: ${KINDS[kindOf(fleet.state[device])].name}, activity ${value(fleet.activity[device])}, memory ${value(fleet.memory[device])}${shares}`;
  }

  nameOf(device) {
    const { fleet } = this;
    const index = fleet.index[device] === 255 ? "GPU" : `GPU ${fleet.index[device]}`;
    const profile = fleet.profiles[fleet.profile[device]];
    return profile ? `${index} ${clean(profile)}` : index;
  }

  /** Show the tooltip of a device beside the pointer; -1 hides it. */
  tip(device, x, y) {
    const tip = byId("tip"), { fleet } = this;
    tip.hidden = device < 0;
    if (this.tipped !== device) {
      clearTimeout(this.resting);
      if (device >= 0) this.resting = setTimeout(() => this.fetchReasons(device), RESTS_MS);
    }
    if (device >= 0 && (this.tipped !== device || this.tippedVersion !== fleet.version)) this.fillTip(device);
    [this.tipped, this.tippedVersion] = [device, fleet.version];
    const stage = tip.parentElement;
    const left = x + 18 + tip.offsetWidth > stage.clientWidth ? x - tip.offsetWidth - 12 : x + 18;
    const top = y + 18 + tip.offsetHeight > stage.clientHeight ? y - tip.offsetHeight - 12 : y + 18;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }

  /** Fetch why a device is in its state, and which pods hold it: the stream has only the state. */
  fetchReasons(device) {
    const node = this.fleet.names[this.fleet.nodeOf[device]];
    this.reasons.request.send(`page/nodes/${encodeURIComponent(node)}`, ({ gpus }) => {
      Object.assign(this.reasons, { node, gpus });
      if (this.tipped === device) this.fillTip(device);
    });
  }

  fillTip(device) {
    const { fleet, reasons } = this;
    const node = fleet.nodeOf[device], name = fleet.names[node];
    const gpu = reasons.node === name ? reasons.gpus[device - fleet.nodeStart[node]] : null; // same order as in the map
    const pods = gpu?.tenants ?? [];
    const bar = (title, byte) => h("div", { class: "tip-row" }, h("span", {}, title), meter(byte === NO_VALUE ? null : byte / FULL), h("span", { class: "num" }, byte === NO_VALUE ? "?" : `${Math.round((byte / FULL) * 100)} %`));
    show(byId("tip"),
      h("div", { class: "tip-title" }, signCanvas(this.paint, fleet.state[device], fleet.shade(device, this.paint.color), 12), h("b", {}, name), h("span", {}, this.nameOf(device))),
      h("div", { class: "muted" }, `${KINDS[kindOf(fleet.state[device])].name} · ${fleet.models[fleet.model[device]] || "unknown model"}`),
      bar("activity", fleet.activity[device]), bar("memory", fleet.memory[device]),
      fleet.replicas[device] > 1 ? h("div", { class: "muted" }, `${fleet.used[device]} of ${fleet.replicas[device]} shares in use`) : null,
      gpu ? h("div", { class: "tip-why" }, gpu.why) : null, processes(gpu, MOST_PROCESSES),
      pods.length ? h("div", { class: "muted" }, `held by ${pods.slice(0, MOST_PODS).join(", ")}${pods.length > MOST_PODS ? ` and ${count(pods.length - MOST_PODS)} more` : ""}`) : null);
  }
}

/** Render a bar for a ratio; null is unknown. */
export function meter(ratio, limit = null) {
  const bar = h("span", { class: "meter", "aria-hidden": "true" });
  if (ratio !== null && ratio !== undefined) {
    const fill = h("span", { class: limit !== null && ratio >= limit ? "fill over" : "fill" });
    fill.style.width = `${Math.max(0, Math.min(100, ratio * 100))}%`;
    bar.append(fill);
  }
  if (limit !== null) {
    const mark = h("span", { class: "mark" });
    mark.style.left = `${limit * 100}%`;
    bar.append(mark);
  }
  return bar;
}
