// Live list of decisions; the reason why a runner-up lost is fetched when its row scrolls into view.

import { clean, count, h, moment, percent, plural, show } from "./dom.js";
import { LatestRequest } from "./requests.js";
import { sourcesOf } from "./signals.js";
import { go, state } from "./url.js";

const KEPT = 300, FIRST = 200, REST_MS = 700, MOST_IDS = 40, AGAIN_MS = 5000;
// A row shows up to two decisions, so this many decisions cover all rows.
const ALL = 2 * KEPT;

const COLUMNS = ["Time", "Pod", "Requested", "Node chosen", "Runner-up, and why it lost", "Took", "Suitable", "kube-scheduler"];

export class Decisions {
  constructor(box) {
    Object.assign(this, { box, rows: new Map(), joined: new Set(), isShown: false, isPaused: false, hasConnected: false, before: null, trouble: "", waiting: [], reasons: new Map(), isResting: false, wanted: [], filter: "", isExplained: false, latest: new LatestRequest(), lost: new LatestRequest(), explanation: new LatestRequest() });
    this.body = h("tbody", {});
    this.note = h("p", { class: "muted", role: "status" });
    this.search = h("input", { type: "search", placeholder: "Pod or node", "aria-label": "Show decisions about a pod or node", oninput: () => { this.filter = this.search.value.toLowerCase(); this.sift(); } });
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.setPaused(!this.isPaused) }, "Pause");
    this.side = h("section", { class: "sheet", "aria-label": "Why", tabindex: "-1", hidden: true });
    show(box, h("div", { class: "bar" }, h("h2", {}, "Decisions"), this.search, this.pause, this.note),
      h("div", { class: "beside" }, h("div", { class: "wide" }, h("table", { class: "grid stack decisions" },
        h("thead", {}, h("tr", {}, COLUMNS.map((name, at) => h("th", { scope: "col", class: at === 5 || at === 6 ? "num" : null }, name)))), this.body)), this.side));
    this.eye = new IntersectionObserver((entries) => this.see(entries), { root: null });
    setInterval(() => this.before && this.trouble && !document.hidden && this.refresh(), AGAIN_MS);
  }

  setShown(isShown) {
    this.isShown = isShown;
    if (isShown && (!this.rows.size || this.before)) this.refresh();
    if (isShown) this.urlChanged(state, { decision: "" });
  }

  /** The stream has connected: fetch the decisions made while it was down. */
  isOpened() {
    if (this.hasConnected && this.rows.size) {
      this.before ??= reach(this.rows);
      this.showCount();
    }
    this.hasConnected = true;
    this.fetchReasons();
    if (!this.side.hidden && !this.isExplained && !this.explanation.isUnderWay) this.explain();
  }

  refresh() {
    if (!this.isShown || this.isPaused) return;
    const { before } = this;
    this.trouble = "";
    this.latest.send(`decisions?brief=true&limit=${before ? ALL : FIRST}`, ({ decisions }) => {
      if (this.isPaused) return;
      this.renew(decisions.reverse(), before);
      if (this.before === before) this.before = null;
      this.showCount();
    }, ({ message }) => {
      this.trouble = message;
      show(this.note, this.trouble);
    });
  }

  /** Update existing rows and insert missing ones; `before`: newest time and numbers when the stream was lost. */
  renew(decisions, before) {
    const known = new Map(decisions.map((one) => [one.id, one]));
    for (const [id, { row }] of this.rows) {
      const now = known.get(id);
      if (now?.bound_node) this.showBound({ id, bound_node: now.bound_node, is_followed: now.is_followed });
      else if (before && Number(row.dataset.at) <= before.until) this.showBound({ id, isForgotten: !now });
    }
    if (before) {
      const from = Date.parse(decisions[0]?.at), until = Date.parse(decisions.at(-1)?.at);
      for (const gap of this.body.querySelectorAll(".gap")) if (gap.dataset.at >= from && gap.dataset.at <= until) gap.remove();
      // A full answer pushes all older rows out of the list, so no gap can remain.
      if (decisions.length < ALL && isLacking(before, decisions)) this.body.insertBefore(gapRow(before.until + 1, "Decisions may be missing here: the connection was lost, and the extender no longer remembers all of them"), this.below(before.until));
    }
    this.add(decisions);
  }

  /** Handle an event of the stream. */
  take(event) {
    if (!this.isShown && !this.rows.size) return;
    if (this.isPaused) {
      this.waiting.push(event);
      if (this.waiting.length > 100) {
        this.before ??= reach(this.rows);
        this.waiting.shift();
      }
      return this.showCount();
    }
    for (const bound of event.bound) this.showBound(bound);
    this.add(event.decisions, event.passed_over);
    this.showCount();
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    this.pause.setAttribute("aria-pressed", String(isPaused));
    show(this.pause, isPaused ? "Go on" : "Pause");
    if (!isPaused) for (const event of this.waiting.splice(0)) this.take(event);
    this.showCount();
    if (!isPaused && this.before) this.refresh();
  }

  showCount() {
    const missed = this.waiting.reduce((sum, event) => sum + event.decisions.length + event.passed_over, 0);
    show(this.note, this.isPaused ? `${this.before ? "at least " : ""}${plural(missed, "decision")} since` : this.before && this.trouble ? this.trouble : this.rows.size ? `the last ${count(this.rows.size)}` : "No decision has been made yet: kube-scheduler has sent no request.");
  }

  /** Insert decisions, given oldest first; other replicas' decisions arrive some seconds later. */
  add(decisions, passedOver = 0) {
    if (passedOver) this.body.prepend(gapRow(Date.parse(decisions[0]?.at) - 1, `${plural(passedOver, "decision")} more, too many to show`));
    for (const one of decisions) {
      if (this.rows.has(one.id) || this.joined.has(one.id)) continue;
      this.join(one);
      const at = Date.parse(one.at);
      const below = this.below(at);
      if (!below && this.body.children.length >= KEPT) continue; // older than the last row
      const row = this.row(one, at);
      this.rows.set(one.id, { row, one });
      row.hidden = !this.isWanted(one);
      mark(row, one);
      this.body.insertBefore(row, below);
      this.eye.observe(row);
    }
    while (this.body.children.length > KEPT) this.drop(this.body.lastElementChild);
  }

  /** Return the row to insert a decision of this time before, null for the end. */
  below(at) {
    let below = this.body.firstElementChild;
    while (below && !(Number(below.dataset.at) <= at)) below = below.nextElementSibling;
    return below;
  }

  drop(row) {
    const { id } = row.dataset;
    this.eye.unobserve(row);
    clearTimeout(this.rows.get(id)?.timer);
    this.joined.delete(this.rows.get(id)?.one.filter?.id);
    this.rows.delete(id);
    this.reasons.delete(id);
    row.remove();
  }

  /** Merge filter and prioritize of one pod into one row. */
  join(one) {
    const before = this.rows.get(one.id.replace(/\d+$/, (number) => String(number - 1)));
    if (one.verb !== "prioritize" || before?.one.verb !== "filter" || before.one.uid !== one.uid || before.one.pod !== one.pod) return;
    this.drop(before.row);
    one.filter = before.one;
    this.joined.add(before.one.id);
  }

  row(one, at) {
    const first = one.filter ?? one;
    const took = one.duration_seconds + (one.filter?.duration_seconds ?? 0);
    const requested = Object.entries(one.request?.resources ?? {}).map(([name, number]) => `${number} ${name.replace("nvidia.com/", "")}`).join(", ");
    const cells = [
      h("td", { class: "time" }, moment(one.at)),
      h("td", { class: "lead" }, h("button", { type: "button", class: "link", "aria-label": `Why, for ${clean(one.pod)}`, onclick: () => go({ decision: one.id }, true) }, one.pod), one.filter ? null : h("span", { class: "muted" }, one.verb === "filter" ? "" : ` ${one.verb}`)),
      h("td", {}, requested),
      h("td", {}, one.node ? h("button", { type: "button", class: "link", onclick: () => go({ node: one.node, gpu: "0" }, true) }, one.node) : h("span", { class: "trouble" }, "none")),
      h("td", { class: "lost" }, one.runner_up ? [h("span", {}, one.runner_up), h("span", { class: "muted reason" }, "")] : one.feasible === 1 ? h("span", { class: "muted" }, "no other node is suitable") : null),
      h("td", { class: "num" }, `${(took * 1000).toFixed(1)} ms`),
      h("td", { class: "num" }, `${count(first.feasible)} of ${count(first.candidates)}`),
      h("td", { class: "followed" }, ...followed(one)),
    ];
    cells.forEach((cell, at) => (cell.dataset.label = COLUMNS[at])); // at phone width each row is a card
    return h("tr", { "data-id": one.id, "data-at": at }, cells);
  }

  showBound(bound) {
    const kept = this.rows.get(bound.id);
    if (!kept) return;
    Object.assign(kept.one, bound);
    show(kept.row.querySelector(".followed"), ...followed(kept.one));
  }

  isWanted(one) {
    return !this.filter || [one.pod, one.node, one.runner_up, one.bound_node].some((text) => text?.toLowerCase().includes(this.filter));
  }

  sift() {
    for (const { row, one } of this.rows.values()) row.hidden = !this.isWanted(one);
  }

  // --- why ------------------------------------------------------------------------------------

  see(entries) {
    for (const entry of entries) {
      const { id } = entry.target.dataset;
      const kept = this.rows.get(id);
      if (!kept?.one.runner_up || this.reasons.has(id)) continue;
      clearTimeout(kept.timer);
      if (entry.isIntersecting) kept.timer = setTimeout(() => this.want(id), REST_MS);
    }
  }

  want(id) {
    if (!this.isShown) return;
    this.wanted.push(id);
    this.fetchReasons();
  }

  /** Fetch the reasons for all runners-up in view, in one request at a time. */
  fetchReasons() {
    if (this.lost.isUnderWay || this.isResting) return;
    const ids = [...new Set(this.wanted)].filter((id) => this.rows.has(id) && !this.reasons.has(id)).slice(-MOST_IDS);
    this.wanted = [...ids]; // until answered: a failed request is repeated with the next one
    if (!ids.length) return;
    this.lost.send(`page/lost?ids=${encodeURIComponent(ids.join(","))}`, (answer) => {
      for (const id of ids) this.showWhy(id, answer.lost_by[id] ?? "");
      this.isResting = true;
      setTimeout(() => {
        this.isResting = false;
        this.fetchReasons();
      }, REST_MS);
    });
  }

  showWhy(id, why) {
    this.reasons.set(id, why);
    const box = this.rows.get(id)?.row.querySelector(".reason");
    if (box) show(box, why ? ` ${why}` : "");
  }

  urlChanged(now, before) {
    if (now.decision === before.decision) return;
    this.explanation.drop();
    for (const { row, one } of this.rows.values()) mark(row, one);
    this.side.hidden = !now.decision || !this.isShown;
    if (this.side.hidden) return;
    this.explain();
    this.side.focus({ preventScroll: true });
  }

  explain() {
    const { decision } = state;
    this.isExplained = false;
    show(this.side, h("p", { class: "muted" }, "Loading"));
    this.explanation.send(`explain?${/^\d+$/.test(decision) ? "number" : "id"}=${encodeURIComponent(decision)}`, (answer) => {
      this.isExplained = true;
      show(this.side, explained(answer));
    }, ({ message }) => show(this.side, closer(), h("p", { class: "trouble" }, message)));
  }
}

/** Mark a row while its decision is explained beside the table. */
function mark(row, one) {
  if ([one.id, one.filter?.id].includes(state.decision)) row.setAttribute("aria-current", "true");
  else row.removeAttribute("aria-current");
}

const gapRow = (at, text) => h("tr", { class: "gap", "data-at": at }, h("td", { colspan: 8 }, text));

/** Return a decision's replica and its number there. */
function partsOf(id) {
  const at = id.lastIndexOf("-");
  return [id.slice(0, at), Number(id.slice(at + 1))];
}

/** Return the newest time of all rows, and the newest number of each replica. */
function reach(rows) {
  let until = -Infinity;
  const last = new Map();
  for (const [id, { row }] of rows) {
    const [replica, number] = partsOf(id);
    until = Math.max(until, Number(row.dataset.at));
    last.set(replica, Math.max(last.get(replica) ?? 0, number));
  }
  return { until, last };
}

/** Return whether decisions are missing after a replica's last known one; given oldest first. */
function isLacking({ last }, decisions) {
  const first = new Map();
  for (const { id } of decisions) {
    const [replica, number] = partsOf(id);
    if (!first.has(replica)) first.set(replica, number);
  }
  return [...last].some(([replica, number]) => !(first.get(replica) <= number + 1));
}

const closer = () => h("button", { type: "button", class: "plain close", "aria-label": "Close", onclick: () => go({ decision: "" }, true) }, "✕");

const SHADOW = "Shadow mode: kube-scheduler did not receive the choice; the answer changed nothing.";

function followed(one) {
  if (!one.bound_node && one.isForgotten) return [h("span", { class: "muted", title: "The decision is no longer remembered, so the pod's node is unknown." }, "unknown")];
  if (one.is_shadow) return [h("span", { class: "state", title: SHADOW }, "shadow"), h("span", { class: "muted" }, !one.bound_node ? " not bound yet" : one.is_followed ? " went there all the same" : ` went to ${clean(one.bound_node)}`)];
  if (!one.bound_node) return [h("span", { class: "muted" }, one.node ? "not bound yet" : "waits")];
  if (one.is_followed) return [h("span", { class: "good" }, "✓ followed")];
  return [h("span", { class: "other" }, "↷ "), one.bound_node];
}

/** Render a decision in full: recorded nodes, parts of each score, rejected nodes. */
function explained(answer) {
  const { decision } = answer;
  return [
    closer(),
    h("h3", {}, answer.pod),
    h("p", {}, decision?.node ? `${decision.node} was first of ${plural(decision.candidates, "node")}${answer.bound_node ? `; the pod is on ${answer.bound_node}` : ""}.` : `None of ${plural(decision?.candidates ?? 0, "node")} is suitable.`),
    decision?.is_shadow ? h("p", { class: "muted" }, SHADOW) : null,
    (answer.nodes ?? []).slice(0, 8).map((node) => h("details", { open: node.rank <= 2 }, h("summary", {}, h("b", {}, `${node.rank ? `${node.rank}. ` : ""}${clean(node.node)}`), node.is_bound ? " " : null, node.is_bound ? h("span", { class: "state" }, "bound") : null),
      node.rejection ? h("p", { class: "trouble" }, node.rejection) : null,
      node.reason ? h("p", { class: "why" }, node.reason) : null,
      node.lost_by && !node.rejection ? h("p", { class: "muted" }, `Behind the first choice: ${node.lost_by}`) : null,
      h("p", { class: "muted" }, `${node.idle} idle of ${node.landing} possible GPUs; needs ${node.needed}. ${node.model}`),
      node.parts?.length ? h("details", {}, h("summary", { class: "muted" }, "Parts of the score"), h("table", { class: "grid small" }, h("tbody", {}, node.parts.map((part) => h("tr", {}, h("th", { scope: "row" }, part.name), h("td", { class: "num" }, percent(part.value)), h("td", { class: "num" }, `× ${part.share.toFixed(6)}`), h("td", { class: "num" }, `+${part.adds.toFixed(6)}`))),
        node.factors.filter((one) => one.keeps < 1).map((one) => h("tr", {}, h("th", { scope: "row" }, `certainty without ${one.name}`), h("td", {}, ""), h("td", {}, ""), h("td", { class: "num" }, `× ${one.keeps.toFixed(3)}`)))))) : null,
      h("ul", { class: "plain-list" }, (node.devices ?? []).map((device) => h("li", { class: device.can_land ? null : "muted" }, `GPU ${device.index ?? "?"}${device.gpu_instance_id ? `/${clean(device.gpu_instance_id)}` : ""}: ${device.state}, ${percent(device.utilization_ratio)} busy, ${percent(device.memory_used_ratio)} of memory${device.can_land ? "" : ", not for this pod"}${device.assumed ? `, ${device.assumed} assumed` : ""}`,
        device.health ? h("div", { class: "trouble" }, device.health) : null,
        sourcesOf(device).map((text) => h("div", { class: "source" }, text))))))),
    answer.rejected?.length ? h("section", {}, h("h4", {}, "Refused"), reasons(answer.rejected)) : null,
    answer.kept?.note ? h("p", { class: "muted" }, answer.kept.note) : null,
  ];
}

/** Format reasons with their counts, as kube-scheduler does. */
export function reasons(list) {
  return h("ul", { class: "reasons" }, list.map((one) => h("li", {}, h("b", { class: "num" }, count(one.count)), h("span", {}, one.reason))));
}
