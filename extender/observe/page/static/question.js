// Asks the API. An answer counts only while nothing newer was asked or answered; this module alone decides that.

/** Calls under way, the oldest first, each with its owner. The answer to a call that is not among them is dropped. */
const calls = new Map();

/** Begin a call; it counts until `end`, also where its signal is aborted before. */
export function begin(owner) {
  const call = new AbortController();
  calls.set(call, owner);
  return call;
}

export const isCounted = (call) => calls.has(call);

export function end(call) {
  calls.delete(call);
  call.abort();
}

/** Why a question has no answer; `status` is 0 where nothing came. */
export class Failure {
  constructor(message, status) {
    Object.assign(this, { message, status });
  }
}

/** A part of the page that shows an answer of the API. */
export class Question {
  path = "";

  get isUnderWay() {
    return [...calls.values()].includes(this);
  }

  /**
   * Ask: either `take` gets the answer's document, or `fail` a Failure. Neither is called once another path is asked
   * for, a later call for the same path is answered, or a token was accepted.
   */
  async ask(path, take, fail = () => {}, options = {}) {
    if (path !== this.path) this.drop();
    this.path = path;
    const call = begin(this);
    const answer = await fetched(path, { ...options, signal: call.signal });
    if (!isCounted(call)) return;
    for (const [one, owner] of calls) {
      if (owner === this) end(one);
      if (one === call) break; // what was asked later is still to be answered
    }
    if (answer instanceof Failure) fail(answer);
    else take(answer);
  }

  /** Drop the answers to all calls under way. */
  drop() {
    for (const [call, owner] of calls) if (owner === this) end(call);
  }
}

async function fetched(path, options) {
  try {
    const response = await fetch(`../v1/${path}`, { ...options, cache: "no-store" });
    if (!response.ok) return new Failure(await reason(response), response.status);
    return response.status === 204 ? null : await response.json();
  } catch {
    return new Failure("the extender does not answer", 0);
  }
}

/** Why a response is no success, in the extender's words. */
export async function reason(response) {
  try {
    return (await response.json()).error ?? `status ${response.status}`;
  } catch {
    return `status ${response.status}`;
  }
}

const signing = new Question();

/** Show a token once; the browser keeps it from there on, out of reach of scripts. */
export function signIn(token, take, fail) {
  signing.drop(); // of two tokens the later one counts
  const body = JSON.stringify({ token });
  signing.ask("session", () => {
    for (const call of calls.keys()) end(call); // each was sent with no token, or with another one
    take();
  }, fail, { method: "POST", headers: { "Content-Type": "application/json" }, body });
}

export const signOut = () => fetch("../v1/session", { method: "DELETE", cache: "no-store" });
