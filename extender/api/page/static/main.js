// Entry point: connect the feed to the fleet, and the URL to the views.

import { Feed } from "./feed.js";
import { Fleet } from "./fleet.js";
import { FleetView } from "./fleet_view.js";
import { Detail } from "./detail.js";
import { Decisions } from "./decisions.js";
import { Pending } from "./pending.js";
import { Holders } from "./holders.js";
import { Pods } from "./pods.js";
import { Overview } from "./overview.js";
import { byId, clean, duration, h, show } from "./dom.js";
import { LatestRequest, signIn, signOut } from "./requests.js";
import { go, onChange, state } from "./url.js";

const OLD_SECONDS = 12;
const VIEWS = ["fleet", "decisions", "pending", "holders", "pods"];

const fleet = new Fleet();
const fleetView = new FleetView(fleet);
const views = { decisions: new Decisions(byId("decisions")), pending: new Pending(byId("pending")), holders: new Holders(byId("holders")), pods: new Pods(byId("pods")) };
const overview = new Overview(byId("overview"));
const detail = new Detail(byId("detail"), fleet, fleetView);
const connection = { state: "connecting", why: "", beat: null, beatAt: 0, changes: {} };

const feed = new Feed({
  fleet: (event) => { fleet.take(event); fleetView.isNew(); detail.isChanged(); showStatus(); },
  looks: (event) => { fleet.takeLooks(event); fleetView.isChanged(); detail.isChanged(); },
  delta: (event) => { fleet.takeDelta(event); fleetView.isChanged(); detail.isChanged(); },
  decisions: (event) => { views.decisions.take(event); views.pending.isChanged(); },
  changes: (event) => takeChanges(event),
  beat: (event) => { connection.beat = event; connection.beatAt = Date.now(); showStatus(); },
  state: (name, why) => {
    connection.state = name;
    connection.why = why;
    if (name === "refused") requestToken(why);
    if (name === "open") {
      byId("sign-in").close(); // another page of this browser may have signed in
      showUser();
      views.decisions.isOpened();
      views[state.view]?.refresh?.();
    }
    showStatus();
  },
});

/** Numbers that grow where pods change: the first ones say nothing that a view has not requested itself. */
function takeChanges(event) {
  for (const [name, number] of Object.entries(event)) {
    if (name in connection.changes && connection.changes[name] !== number) [views[name], views.pods, overview].forEach((view) => view?.isChanged());
  }
  connection.changes = event;
}

// --- connection status -------------------------------------------------------------------------

let lastStatus = "";

function showStatus() {
  const silent = feed.receivedAt ? (Date.now() - feed.receivedAt) / 1000 : 0;
  const isOld = connection.state !== "open" || silent > OLD_SECONDS;
  const since = feed.receivedAt ? `the data is ${duration(silent)} old` : "nothing received yet";
  let text = "Live", lamp = "live", notice = "";
  // Until the fleet is known, nothing on the page can be live.
  if (connection.state === "connecting" || (connection.state === "open" && !fleet.version)) [text, lamp] = ["Connecting", "wait"];
  else if (connection.state === "refused") [text, lamp] = ["Token needed", "old"];
  else if (isOld) {
    [text, lamp] = [feed.receivedAt ? `Old: ${duration(silent)}` : "No answer", "old"];
    notice = `${capital(connection.why || "no data arrives")}: ${since}. Trying again.`;
  } else {
    const trouble = (connection.beat?.sources ?? []).filter((source) => source.error);
    if (trouble.length) {
      [text, lamp] = ["Live, telemetry failing", "wait"];
      notice = trouble.map((source) => `${source.name}: ${source.error}${source.age_seconds === null ? "" : ` (last answer ${duration(source.age_seconds)} ago)`}`).join("; ");
    }
  }
  document.documentElement.toggleAttribute("data-old", lamp === "old");
  // Only the notice shows the growing age: screen readers announce each change of the status.
  const spoken = `${lamp} ${text.replace(/:.*/, "")}`;
  byId("status").dataset.lamp = lamp;
  if (spoken !== lastStatus) {
    lastStatus = spoken;
    byId("status-text").textContent = text.replace(/:.*/, "");
  }
  byId("status").title = feed.receivedAt ? `last update ${duration(silent)} ago` : "";
  const box = byId("notice");
  box.hidden = !notice;
  if (box.textContent !== clean(notice)) show(box, notice);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// --- signed-in user ----------------------------------------------------------------------------

function requestToken(why) {
  const dialog = byId("sign-in");
  if (dialog.open) return; // it shows the result of the last token, while the page retries without one
  show(byId("sign-in-why"), why);
  dialog.showModal();
}

byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(byId("token").value.trim(), () => {
    byId("token").value = "";
    byId("sign-in").close();
    feed.again();
  }, ({ message }) => show(byId("sign-in-why"), message));
});

const whose = new LatestRequest();

function showUser() {
  const who = byId("who");
  whose.send("session", ({ user, sees_all: seesAll, namespaces }) => {
    who.hidden = !user;
    if (user) show(byId("who-name"), user, h("span", { class: "muted" }, seesAll ? "" : namespaces.length ? ` sees pods of ${namespaces.slice(0, 4).join(", ")}${namespaces.length > 4 ? ", ..." : ""}` : " sees no pods"));
  }, () => (who.hidden = true));
}

byId("sign-out").addEventListener("click", async () => {
  await signOut();
  location.reload();
});

// --- views -------------------------------------------------------------------------------------

function showView() {
  const view = VIEWS.includes(state.view) ? state.view : "fleet";
  for (const name of VIEWS) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll(".tabs a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "fleet" ? "idlegpu" : `idlegpu: ${document.querySelector(`[data-view=${view}]`).textContent.toLowerCase()}`;
  for (const [name, shown] of Object.entries(views)) shown.setShown(name === view);
  overview.setShown(view === "fleet");
  if (view === "fleet") fleetView.isSeen();
}

for (const link of document.querySelectorAll(".tabs a")) {
  link.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go({ view: link.dataset.view, node: "", gpu: "", decision: "" }, true);
  });
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const isDark = state.theme ? state.theme === "dark" : prefersDark.matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  fleetView.setTheme(isDark);
}

prefersDark.addEventListener("change", showTheme);
byId("theme").addEventListener("click", () => go({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" }));

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.closest("input, select, textarea, dialog");
  if (event.key === "Escape") {
    if (event.target === byId("search") && state.q) go({ q: "" });
    else if (!byId("detail").hidden) detail.close();
    return;
  }
  if (isTyping) return;
  const keys = {
    "/": () => { go({ view: "fleet" }); byId("search").focus(); },
    t: () => byId("theme").click(),
    "+": () => fleetView.map.step(1), "=": () => fleetView.map.step(1), "-": () => fleetView.map.step(-1), 0: () => fleetView.map.setZoom(0),
    1: () => go({ view: "fleet" }, true), 2: () => go({ view: "decisions" }, true), 3: () => go({ view: "pending" }, true), 4: () => go({ view: "holders" }, true), 5: () => go({ view: "pods" }, true),
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

onChange((now, before) => {
  if (now.view !== before.view) showView();
  if (now.theme !== before.theme) showTheme();
  fleetView.urlChanged(now, before);
  detail.urlChanged(now, before);
  for (const view of Object.values(views)) view.urlChanged?.(now, before);
});

showTheme();
showView();
fleetView.urlChanged(state, {});
detail.urlChanged(state, {});
setInterval(showStatus, 1000);
showStatus();
feed.run();
