// The fleet as a table, the accessible form of the map, some nodes at a time.

import { CORDONED, FULL, KINDS, NOT_READY, NO_VALUE, kindOf } from "./fleet.js";
import { clean, count, h, plural, renew } from "./dom.js";
import { go } from "./url.js";

const PAGE = 100;

export class FleetTable {
  constructor(box, view) {
    Object.assign(this, { box, view, page: 0, last: 0 });
  }

  show() {
    this.page = 0;
    this.render();
  }

  /** Update at most every two seconds. */
  refresh() {
    if (this.timer || this.box.hidden) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      if (!this.box.hidden) this.render();
    }, Math.max(0, this.last + 2000 - Date.now()));
  }

  render() {
    this.last = Date.now();
    const { groups } = this.view;
    const nodes = groups.flatMap((group) => group.nodes);
    const firsts = new Map(groups.filter((group) => group.name).map((group) => [group.nodes[0], group]));
    const pages = Math.max(1, Math.ceil(nodes.length / PAGE));
    this.page = Math.min(this.page, pages - 1);
    const some = nodes.slice(this.page * PAGE, (this.page + 1) * PAGE);
    renew(this.box,
      h("table", { class: "grid stack" },
        h("caption", {}, plural(nodes.length, "node") + (pages > 1 ? `, page ${this.page + 1} of ${pages}` : "") + (this.view.fleet.hasInstances ? "; each MIG instance has a state of its own" : "")),
        h("thead", {}, h("tr", {}, ["Node", "Model", "GPUs", ...KINDS.map((kind) => kind.name), "Mean activity", "Mean memory"].map((name, at) => h("th", { scope: "col", class: at > 1 ? "num" : null }, name)))),
        h("tbody", {}, some.map((node) => [firsts.has(node) ? groupRow(firsts.get(node)) : null, this.row(node)]))),
      pages > 1 ? h("div", { class: "row pages" }, this.button("Previous", -1, this.page > 0), this.button("Next", 1, this.page < pages - 1)) : null);
  }

  button(name, step, isThere) {
    return h("button", { type: "button", disabled: !isThere, onclick: () => { this.page += step; this.render(); this.box.scrollTop = 0; } }, name);
  }

  row(node) {
    const { fleet } = this.view;
    const kinds = new Array(KINDS.length).fill(0);
    const sums = { activity: [0, 0], memory: [0, 0] };
    for (let device = fleet.nodeStart[node]; device < fleet.nodeStart[node + 1]; device++) {
      kinds[kindOf(fleet.state[device])]++;
      for (const [name, sum] of Object.entries(sums)) {
        if (fleet[name][device] !== NO_VALUE) {
          sum[0] += fleet[name][device] / FULL;
          sum[1]++;
        }
      }
    }
    const mean = ([sum, known]) => (known ? `${Math.round((sum / known) * 100)} %` : "unknown");
    const nodeState = fleet.nodeState[node];
    const note = nodeState & NOT_READY ? " (not ready)" : nodeState & CORDONED ? " (cordoned)" : "";
    const name = fleet.names[node];
    const { gpus, instances } = fleet.sizes(node);
    return h("tr", { "data-key": name },
      h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: () => go({ node: name, gpu: "0" }, true) }, clean(name)), note),
      h("td", { class: "wide", "data-label": "Model" }, fleet.modelOf(node)),
      h("td", { class: "num", "data-label": "GPUs" }, gpus || !instances ? count(gpus) : null, gpus && instances ? ", " : null, instances ? h("span", { class: "muted" }, plural(instances, "MIG instance")) : null),
      kinds.map((number, at) => h("td", { class: number ? "num" : "num zero", "data-label": KINDS[at].name }, count(number))),
      h("td", { class: "num", "data-label": "Mean activity" }, mean(sums.activity)), h("td", { class: "num", "data-label": "Mean memory" }, mean(sums.memory)));
  }
}

const groupRow = (group) => h("tr", { class: "group-row" }, h("th", { scope: "rowgroup", colspan: 5 + KINDS.length }, group.name, h("span", { class: "muted" }, `, ${plural(group.nodes.length, "node")}`)));
