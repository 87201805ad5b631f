// The fleet's devices as columns: apply events, filter, group and count.

import { count, plural } from "./dom.js";

export const IDLE = 0, BUSY = 1, STALE = 2, UNKNOWN = 3, UNHEALTHY = 4, FOREIGN = 5, EXCLUDED = 6;
export const HELD = 8, ASSUMED = 16, LESS = 32;
export const NO_VALUE = 255, FULL = 200;
export const NOT_READY = 1, CORDONED = 2, TAINTED = 4;

/** Meaning of the signs; an idle GPU has one of two signs, by whether a pod holds it. */
export const KINDS = [
  { id: "idle", name: "idle", look: IDLE, held: false, about: "idle and free: activity and memory in use are below their thresholds, and no pod holds it" },
  { id: "held", name: "held idle", look: IDLE, held: true, about: "idle although a pod holds it" },
  { id: "busy", name: "busy", look: BUSY, about: "activity or memory in use is not below its threshold, or pods were just placed on it" },
  { id: "stale", name: "stale", look: STALE, about: "the last reading is too old to be sure" },
  { id: "unknown", name: "unknown", look: UNKNOWN, about: "no usable reading" },
  { id: "unhealthy", name: "unhealthy", look: UNHEALTHY, about: "cannot work: XID errors, broken memory, fallen off the bus, ..." },
  { id: "foreign", name: "foreign", look: FOREIGN, about: "used by a process that no pod accounts for" },
  { id: "excluded", name: "excluded", look: EXCLUDED, about: "works, but its node gets no pods because another of its GPUs has failed" },
];
const KIND_OF = new Uint8Array(64);
for (let state = 0; state < 64; state++) {
  const look = state & 7;
  KIND_OF[state] = look === IDLE ? (state & HELD ? 1 : 0) : look + 1;
}
export const kindOf = (state) => KIND_OF[state & 63];

function unpack(text, Type) {
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(text);
  else {
    const binary = atob(text);
    bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  }
  return Type === Uint8Array ? bytes : new Type(bytes.buffer, 0, bytes.byteLength / Type.BYTES_PER_ELEMENT);
}

const LOOKS = ["state", "activity", "memory", "used"];

export class Fleet {
  constructor() {
    this.version = 0;
    this.at = 0;
    this.clear();
  }

  clear() {
    this.names = [];
    this.size = 0;
    this.nodeStart = new Uint32Array(1);
    this.cardStart = new Uint32Array(1);
    this.nodeCard = new Uint32Array(1);
    this.models = [];
    this.labels = {};
    this.thresholds = { utilization: 0.3, memory: 0.5 };
  }

  /** Apply a `fleet` event: replace everything. */
  take(event) {
    this.version = event.version;
    this.at = event.at;
    this.names = event.nodes;
    this.lower = event.nodes.map((name) => name.toLowerCase());
    this.thresholds = event.thresholds;
    this.unit = event.memory_unit_bytes;
    this.models = event.models;
    this.profiles = event.profiles;
    this.resources = event.resources;
    this.slices = event.profiles.map((profile) => Number(/^(\d+)/.exec(profile)?.[1] ?? 1));
    this.nodeState = unpack(event.node_state, Uint8Array);
    for (const name of ["card", "index", "profile", "resource"]) this[name] = unpack(event[name], Uint8Array);
    for (const name of ["model", "replicas", "memory_total"]) this[name] = unpack(event[name], Uint16Array);
    for (const name of LOOKS) this[name] = unpack(event[name], Uint8Array);
    this.labels = {};
    for (const [label, { values, of }] of Object.entries(event.labels)) {
      this.labels[label] = { values, of: unpack(of, Uint16Array) };
    }
    this.size = this.state.length;
    this.layCards(unpack(event.counts, Uint16Array));
  }

  /** Compute the devices of each node, and their cards. */
  layCards(counts) {
    const nodes = this.names.length;
    this.nodeStart = new Uint32Array(nodes + 1);
    this.nodeCard = new Uint32Array(nodes + 1);
    this.nodeOf = new Uint32Array(this.size);
    const starts = [];
    let at = 0;
    for (let node = 0; node < nodes; node++) {
      this.nodeStart[node] = at;
      this.nodeCard[node] = starts.length;
      const end = at + counts[node];
      for (let device = at; device < end; device++) {
        this.nodeOf[device] = node;
        if (device === at || this.card[device] !== this.card[device - 1]) starts.push(device);
      }
      at = end;
    }
    this.nodeStart[nodes] = at;
    this.nodeCard[nodes] = starts.length;
    starts.push(at);
    this.cardStart = Uint32Array.from(starts);
  }

  takeLooks(event) {
    this.version = event.version;
    this.at = event.at;
    for (const name of LOOKS) this[name] = unpack(event[name], Uint8Array);
  }

  takeDelta(event) {
    this.version = event.version;
    this.at = event.at;
    const places = unpack(event.places, Uint32Array);
    for (const name of LOOKS) {
      const values = unpack(event[name], Uint8Array);
      const column = this[name];
      for (let i = 0; i < places.length; i++) column[places[i]] = values[i];
    }
  }

  /** Return the value for a device's color; a busy device never has the color of an idle one. */
  shade(device, column) {
    const value = this[column][device];
    const limit = FULL * (column === "memory" ? this.thresholds.memory : this.thresholds.utilization);
    return (this.state[device] & 7) === BUSY ? Math.max(value, limit) : value;
  }

  modelOf(node) {
    const at = this.nodeStart[node];
    return at < this.nodeStart[node + 1] ? this.models[this.model[at]] || "unknown model" : "no GPUs seen";
  }

  isInstance(device) {
    return Boolean(this.profiles[this.profile[device]]);
  }

  /** Count a node's whole GPUs, its MIG instances, and the GPUs that these divide. */
  sizes(node) {
    let gpus = 0, instances = 0, divided = 0;
    for (let card = this.nodeCard[node]; card < this.nodeCard[node + 1]; card++) {
      const start = this.cardStart[card];
      if (!this.isInstance(start)) gpus++;
      else {
        divided++;
        instances += this.cardStart[card + 1] - start;
      }
    }
    return { gpus, instances, divided };
  }

  get hasInstances() {
    return this.profile?.some((number) => this.profiles[number]) ?? false;
  }

  /** Count the devices of all or some nodes: whole GPUs, MIG instances, divided GPUs, idle instances, and each kind. */
  counts(nodes = this.names.keys()) {
    const found = { gpus: 0, instances: 0, divided: 0, idleInstances: 0, kinds: new Uint32Array(KINDS.length) };
    for (const node of nodes) {
      for (const [name, number] of Object.entries(this.sizes(node))) found[name] += number;
      for (let device = this.nodeStart[node]; device < this.nodeStart[node + 1]; device++) {
        const kind = kindOf(this.state[device]);
        found.kinds[kind]++;
        if (kind === 0 && this.isInstance(device)) found.idleInstances++;
      }
    }
    return found;
  }

  /** Format counts: whole GPUs and MIG instances add up to the devices. */
  sizeInWords({ gpus, instances, divided }) {
    if (!instances) return [plural(gpus, "GPU")];
    const parts = `${plural(instances, "MIG instance")} on ${gpus ? `${count(divided)} more ${divided === 1 ? "GPU" : "GPUs"}` : plural(divided, "GPU")}`;
    return gpus ? [plural(gpus, "GPU"), parts] : [parts];
  }

  /** Return the matching nodes in groups; empty `kinds` means all. */
  select({ q, model, kinds, group, sort }) {
    const words = q.toLowerCase().split(/\s+/).filter(Boolean);
    const groups = new Map();
    const wanted = model ? this.models.indexOf(model) : -1;
    const key = this.groupKey(group);
    for (let node = 0; node < this.names.length; node++) {
      if (words.length && !this.matches(node, words)) continue;
      if (model && !this.hasModel(node, wanted)) continue;
      if (kinds.size && !this.hasKind(node, kinds)) continue;
      const name = key(node);
      let nodes = groups.get(name);
      if (!nodes) groups.set(name, (nodes = []));
      nodes.push(node);
    }
    const listed = [...groups].map(([name, nodes]) => ({ name, nodes: this.sorted(nodes, sort) }));
    listed.sort((a, b) => (a.name < b.name ? -1 : 1));
    return listed;
  }

  matches(node, words) {
    const name = this.lower[node];
    return words.every((word) => name.includes(word) || this.modelOf(node).toLowerCase().includes(word));
  }

  hasModel(node, wanted) {
    for (let device = this.nodeStart[node]; device < this.nodeStart[node + 1]; device++) if (this.model[device] === wanted) return true;
    return false;
  }

  hasKind(node, kinds) {
    for (let device = this.nodeStart[node]; device < this.nodeStart[node + 1]; device++) {
      if (kinds.has(kindOf(this.state[device]))) return true;
    }
    return false;
  }

  groupKey(group) {
    if (group === "none") return () => "";
    const label = this.labels[group];
    if (label) return (node) => label.values[label.of[node]] || "not labelled";
    return (node) => this.modelOf(node);
  }

  sorted(nodes, sort) {
    if (sort === "name") return nodes;
    const rank = new Map(nodes.map((node) => [node, this.rank(node, sort)]));
    return nodes.sort((a, b) => rank.get(b) - rank.get(a) || a - b);
  }

  rank(node, sort) {
    let sum = 0;
    const start = this.nodeStart[node], end = this.nodeStart[node + 1];
    for (let device = start; device < end; device++) {
      const look = this.state[device] & 7;
      if (sort === "idle") sum += look === IDLE ? (this.state[device] & HELD ? 0.3 : 1) : 0;
      else if (sort === "busy") sum += this.activity[device] === NO_VALUE ? 0 : this.activity[device] / FULL / (end - start);
      else sum += look >= STALE ? (look === UNHEALTHY ? 3 : look === FOREIGN ? 2 : 1) : 0;
    }
    return sum;
  }

  /** Return the models, sorted by number of cards. */
  modelCounts() {
    const found = new Uint32Array(this.models.length);
    for (let card = 0; card < this.cardStart.length - 1; card++) found[this.model[this.cardStart[card]]]++;
    return this.models.map((name, at) => ({ name, cards: found[at] })).sort((a, b) => b.cards - a.cards);
  }
}
