// One line above the map: GPU-hours that were held idle today, and pods that wait.

import { clock, count, h, plural, renew } from "./dom.js";
import { LatestRequest } from "./requests.js";
import { RefreshedView } from "./refresh_timer.js";
import { go } from "./url.js";

const GAP_MS = 15000;
const MOST_PODS = 500;
const LONG_SECONDS = 600, SHORTEST_SECONDS = 3600, LONGEST_SECONDS = 86400;

export class Overview extends RefreshedView {
  constructor(box) {
    super(GAP_MS);
    Object.assign(this, { box, usage: new LatestRequest(), pending: new LatestRequest(), hours: null, pods: null });
  }

  refresh() {
    if (!this.isShown || this.usage.isUnderWay || this.pending.isUnderWay) return;
    this.refreshTimer.note();
    const today = (Date.now() - new Date().setHours(0, 0, 0, 0)) / 1000;
    const since = Math.round(Math.min(Math.max(today, SHORTEST_SECONDS), LONGEST_SECONDS));
    const load = (request, path, name, words) => request.send(path, (answer) => {
      this[name] = words(answer);
      this.render();
    }, () => {
      this[name] = null; // another part of the page shows the failure
      this.render();
    });
    load(this.usage, `usage?since=${since}`, "hours", hoursInWords);
    load(this.pending, `pending?limit=${MOST_PODS}`, "pods", podsInWords);
  }

  render() {
    const link = (view, text) => (text ? h("button", { type: "button", class: "link", onclick: () => go({ view }, true) }, text) : null);
    renew(this.box, link("holders", this.hours), link("pending", this.pods));
  }
}

const TENTH = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 1 });

function hoursInWords({ sums, since }) {
  const from = `since ${clock(since).slice(0, 5)}`;
  if (sums.gpu_hours < 0.05) return `no GPU-hours are recorded ${from} yet`; // not "0 of 0" shortly after the start
  return `${TENTH.format(sums.gpu_hours_idle)} of ${TENTH.format(sums.gpu_hours)} GPU-hours held idle ${from}`;
}

function podsInWords({ pods, total }) {
  const refused = pods.filter((pod) => pod.state === "refused" && pod.waiting_seconds >= LONG_SECONDS).length;
  const some = pods.length < total ? "at least " : "";
  return `${total ? plural(total, "pod") : "no pod"} ${total > 1 ? "wait" : "waits"}${refused ? `, ${some}${count(refused)} refused for over ${LONG_SECONDS / 60} min` : ""}`;
}
