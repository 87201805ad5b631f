// Format signals with unit and source, including fields that this page does not know.

import { bytes, duration, percent } from "./dom.js";

const NAMES = {
  gpu_utilization_ratio: "GPU utilization", graphics_active_ratio: "graphics engine", sm_active_ratio: "SMs",
  tensor_active_ratio: "tensor cores", dram_active_ratio: "memory traffic", memory_copy_utilization_ratio: "memory copy",
  memory_used_bytes: "memory in use", memory_free_bytes: "memory free", power_watts: "power", power_limit_watts: "power limit",
  temperature_celsius: "temperature", memory_temperature_celsius: "memory temperature",
};

export const nameOfSignal = (signal) => NAMES[signal] ?? signal.replaceAll("_", " ");

export function inUnit(signal, value) {
  if (signal.endsWith("_ratio")) return percent(value);
  if (signal.endsWith("_bytes")) return bytes(value);
  if (signal.endsWith("_watts")) return `${Math.round(value)} W`;
  if (signal.endsWith("_celsius")) return `${Math.round(value)} °C`;
  return String(value);
}

/** Return a line for each source and age of a device's signals; equal ones share a line. */
export function sourcesOf({ signals, source, age_seconds: age }) {
  const lines = new Map();
  for (const [name, one] of Object.entries(signals ?? {})) {
    const by = when(one.source, one.age_seconds);
    const rest = Object.entries(one).filter(([key]) => key !== "source" && key !== "age_seconds");
    const more = rest.map(([key, value]) => inWords(key === "value" ? (one.signal ?? name) : key, value)).filter(Boolean);
    lines.set(by, [...(lines.get(by) ?? []), more.length ? `${nameOfSignal(name)} (${more.join(", ")})` : nameOfSignal(name)]);
  }
  if (!lines.size) return source && source !== "none" ? [when(source, age)] : [];
  return [...lines].map(([by, names]) => `${names.join(", ")}: ${by}`);
}

const when = (source, age) => (age === null || age === undefined ? source : `${source}, ${duration(age)} before`);

/** Return a signal's further fields besides source and age, "" if there are none. */
function inWords(key, value) {
  if (Array.isArray(value)) return value.map((one) => inWords(key, one)).join(", ");
  if (typeof value === "number") return inUnit(key, value);
  if (typeof value === "string") return nameOfSignal(value);
  return value === true ? nameOfSignal(key) : "";
}
