// Waiting pods, with the reasons as kube-scheduler counts them, and hints.

import { reasons } from "./decisions.js";
import { bytes, count, duration, h, plural, renew, show } from "./dom.js";
import { LatestRequest } from "./requests.js";
import { RefreshedView } from "./refresh_timer.js";
import { go } from "./url.js";

const GAP_MS = 5000;
const STATES = {
  refused: "idlegpu refuses the nodes that kube-scheduler would accept", unschedulable: "kube-scheduler finds no node, even before it asks idlegpu", placing: "idlegpu chose a node a moment ago; the pod is not bound yet",
  nominated: "kube-scheduler evicts other pods to make room", gated: "held back by scheduling gates", untried: "not tried yet", deleting: "is being deleted",
};

export class Pending extends RefreshedView {
  constructor(box) {
    super(GAP_MS);
    Object.assign(this, { box, request: new LatestRequest() });
    this.note = h("p", { class: "muted", role: "status" }, "Loading");
    this.pods = [];
    this.search = h("input", { type: "search", placeholder: "Pod, owner or reason", "aria-label": "Show waiting pods by pod, owner or reason", oninput: () => this.render() });
    this.list = h("div", {});
    show(box, h("div", { class: "bar" }, h("h2", {}, "Waiting pods"), this.search, this.note), this.list);
  }

  refresh() {
    if (!this.isShown || this.request.isUnderWay) return;
    this.refreshTimer.note();
    this.request.send("pending", (answer) => {
      const away = answer.unreachable.length ? `; without ${plural(answer.unreachable.length, "replica")} that did not answer` : "";
      show(this.note, answer.total ? `${plural(answer.total, "pod")}, the longest wait first${answer.pods.length < answer.total ? `; ${count(answer.pods.length)} are shown` : ""}${away}` : "No pod with GPUs waits.");
      this.pods = answer.pods;
      this.render();
    }, ({ message }) => {
      show(this.note, message);
      this.refreshTimer.isChanged();
    });
  }

  /** Show the pods that the reader searches for, by the reason that refuses most nodes. */
  render() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const groups = new Map();
    for (const pod of this.pods) {
      const why = reasonOf(pod);
      const text = [pod.pod, pod.owner, why].join(" ").toLowerCase();
      if (words.every((word) => text.includes(word))) groups.set(why, [...(groups.get(why) ?? []), pod]);
    }
    renew(this.list, [...groups].map(([why, pods]) => h("section", { "data-key": why, "aria-label": why },
      h("h3", { class: "group-name" }, why, h("span", { class: "muted" }, `, ${plural(pods.length, "pod")}`)),
      h("div", { class: "cards" }, pods.map((pod) => this.card(pod))))));
    if (this.pods.length && !groups.size) show(this.list, h("p", { class: "group-name" }, "No waiting pod matches."));
  }

  card(pod) {
    const requested = Object.entries(pod.resources).map(([name, number]) => `${number} ${name}`).join(", ");
    return h("article", { class: "card", "data-key": pod.uid },
      h("header", {}, h("h3", {}, pod.pod), h("span", { class: `state ${pod.state}` }, pod.state), h("span", { class: "muted" }, `waits ${duration(pod.waiting_seconds)}`)),
      h("p", { class: "muted" }, [requested, pod.gpu_memory_bytes ? `${bytes(pod.gpu_memory_bytes)} each` : null, pod.owner, pod.scheduler].filter(Boolean).join(" · ")),
      h("p", {}, STATES[pod.state] ?? "", pod.nominated_node ? `: ${pod.nominated_node}` : pod.assumed_node ? `: ${pod.assumed_node}` : ""),
      pod.by_scheduler.length || pod.by_us.length ? h("div", { class: "pair" },
        h("section", {}, h("h4", {}, "kube-scheduler refuses"), pod.by_scheduler.length ? reasons(pod.by_scheduler) : h("p", { class: "muted" }, "nothing")),
        h("section", {}, h("h4", {}, "idlegpu refuses"), pod.by_us.length ? reasons(pod.by_us) : h("p", { class: "muted" }, "nothing"))) : null,
      pod.hints.length ? h("section", {}, h("h4", {}, "What would have to change"), h("ul", { class: "plain-list" }, pod.hints.map((hint) => h("li", {}, withCommands(hint))))) : null,
      pod.message ? h("details", {}, h("summary", {}, "kube-scheduler's words"), h("p", { class: "words" }, pod.message), pod.preemption ? h("p", { class: "words" }, pod.preemption) : null) : null,
      pod.decision ? h("p", {}, h("button", { type: "button", class: "link", onclick: () => go({ view: "decisions", decision: pod.decision.id }, true) }, `idlegpu's last decision (${pod.decision.feasible} of ${plural(pod.decision.candidates, "node")} suitable)`)) : null);
  }
}

/** Show commands, which stand between backquotes, as code. */
const withCommands = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

/** Return the reason for most nodes, else the state in words. */
export function reasonOf({ state, by_us: byUs, by_scheduler: byScheduler }) {
  const all = [...byUs, ...byScheduler];
  return all.length ? all.reduce((one, other) => (other.count > one.count ? other : one)).reason.replace(/^node\(s\) (had )?/, "") : STATES[state] ?? state;
}
