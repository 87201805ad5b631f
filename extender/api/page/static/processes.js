// Processes that use a GPU without holding it, in words.

import { bytes, h, moment, plural } from "./dom.js";

/** Render up to `most` processes of a GPU, one line each; null if none is known. */
export function processes(gpu, most = Infinity) {
  const known = gpu?.foreign_processes ?? [];
  if (!known.length) return null;
  return h("ul", { class: "plain-list processes" }, known.slice(0, most).map((one) => h("li", {}, inWords(one))),
    known.length > most ? h("li", { class: "muted" }, `and ${plural(known.length - most, "process", "processes")} more`) : null);
}

function inWords({ pid, name, memory_bytes: memory, started_at: startedAt, pod, container }) {
  const place = pod ? `in pod ${pod}` : "outside Kubernetes";
  const parts = [
    `${memory === null ? "unknown memory" : bytes(memory)} by ${name || "a process"}`, `PID ${pid}`,
    container ? `${place} (${container})` : place, startedAt ? `since ${moment(startedAt).slice(0, -3)}` : null,
  ];
  return parts.filter(Boolean).join(", ");
}
