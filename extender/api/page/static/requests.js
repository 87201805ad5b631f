// Requests to the API. An answer is dropped if a newer request was sent or answered.

/** Open calls, oldest first, each with its owner. The answer to a call that is not in it is dropped. */
const calls = new Map();

/** Begin a call; it counts until `end`, even if its signal is aborted before. */
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

/** Failure of a request; `status` is 0 if there was no response. */
export class Failure {
  constructor(message, status) {
    Object.assign(this, { message, status });
  }
}

/** A request whose answer a part of the page shows. */
export class LatestRequest {
  path = "";

  get isUnderWay() {
    return [...calls.values()].includes(this);
  }

  /**
   * Send a request: `take` receives the answer's document, or `fail` a Failure. Neither is called once another path is
   * requested, a later call for the same path is answered, or a token was accepted.
   */
  async send(path, take, fail = () => {}, options = {}) {
    if (path !== this.path) this.drop();
    this.path = path;
    const call = begin(this);
    const answer = await fetched(path, { ...options, signal: call.signal });
    if (!isCounted(call)) return;
    for (const [one, owner] of calls) {
      if (owner === this) end(one);
      if (one === call) break; // later calls are still open
    }
    if (answer instanceof Failure) fail(answer);
    else take(answer);
  }

  /** Drop the answers to all open calls. */
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

/** Return the extender's error message in a failed response, else what a proxy's status means. */
export async function reason(response) {
  const failure = `the extender ${response.status < 500 ? "refuses this" : "does not answer"} (status ${response.status})`;
  try {
    return (await response.json()).error ?? failure;
  } catch {
    return failure;
  }
}

const signing = new LatestRequest();

/** Send a token once; the browser then stores it in a cookie that scripts cannot read. */
export function signIn(token, take, fail) {
  signing.drop(); // of two tokens the later one wins
  const body = JSON.stringify({ token });
  signing.send("session", () => {
    for (const call of calls.keys()) end(call); // they were sent without this token
    take();
  }, fail, { method: "POST", headers: { "Content-Type": "application/json" }, body });
}

export const signOut = () => fetch("../v1/session", { method: "DELETE", cache: "no-store" });
