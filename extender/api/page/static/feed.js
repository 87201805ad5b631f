// Receives updates by server-sent events, reconnects, and tracks the time of the last event.
// Uses fetch instead of EventSource, because fetch shows the reason of a refusal.

import { begin, end, isCounted, reason } from "./requests.js";

const SILENCE_MS = 15000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const HIDDEN_MS = 60000;

export class Feed {
  /** `on` has a handler for each event name, and `state(name, why)` for the connection. */
  constructor(on) {
    this.on = on;
    this.receivedAt = 0;
    this.wait = FIRST_WAIT_MS;
    this.call = null;
    this.isPaused = false;
    this.wake = () => {};
  }

  async run() {
    addEventListener("online", () => this.wake());
    document.addEventListener("visibilitychange", () => this.follow());
    for (;;) {
      if (this.isPaused) {
        await this.pause(3600000);
        continue;
      }
      await this.listen();
      if (this.isPaused) continue;
      await this.pause(this.wait * (0.7 + 0.6 * Math.random()));
      this.wait = Math.min(this.wait * 2, LONGEST_WAIT_MS);
    }
  }

  /** Disconnect a hidden page after a while. */
  follow() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        this.isPaused = true;
        this.call?.abort();
      }, HIDDEN_MS);
    } else if (this.isPaused) {
      this.isPaused = false;
      this.wake();
    }
  }

  pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  /** Reconnect soon: signing in has ended the current call. */
  again() {
    this.wait = FIRST_WAIT_MS;
    this.wake();
  }

  async listen() {
    const call = (this.call = begin(this));
    const notify = (name, why) => isCounted(call) && this.on.state(name, why);
    let dog;
    const watch = () => {
      clearTimeout(dog);
      dog = setTimeout(() => call.abort(), SILENCE_MS);
    };
    try {
      watch();
      const response = await fetch("../v1/page/stream", {
        headers: { Accept: "text/event-stream" }, signal: call.signal, cache: "no-store",
      });
      if (!response.ok) {
        notify(response.status === 401 || response.status === 403 ? "refused" : "lost", await reason(response));
        return;
      }
      notify("open", "");
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || !isCounted(call)) break;
        watch();
        this.receivedAt = Date.now();
        rest = this.take(rest + value);
        this.wait = FIRST_WAIT_MS;
      }
      notify("lost", "the connection has ended");
    } catch {
      notify("lost", "the extender does not answer");
    } finally {
      clearTimeout(dog);
      end(call);
    }
  }

  /** Dispatch complete events; return the incomplete rest. */
  take(text) {
    let from = 0;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n", from)) {
      this.hand(text.slice(from, end));
      from = end + 2;
    }
    return from ? text.slice(from) : text;
  }

  hand(block) {
    let name = "message";
    let data = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data && this.on[name]) this.on[name](JSON.parse(data));
  }
}
