// When to refresh: at once after a change, and otherwise at long intervals, because ages grow.

const LOOK_MS = 1000, SELDOM_MS = 30000;

export class Renewal {
  /** `ask` is called at most every `gap` milliseconds after changes, and every `seldom` milliseconds anyway. */
  constructor(ask, gap, seldom = SELDOM_MS) {
    Object.assign(this, { ask, gap, seldom, askedAt: 0, isDue: false });
    setInterval(() => this.look(), LOOK_MS);
  }

  isChanged() {
    this.isDue = true;
    this.look();
  }

  /** A request was sent, for any reason. */
  note() {
    this.askedAt = Date.now();
    this.isDue = false;
  }

  look() {
    if (!document.hidden && Date.now() - this.askedAt >= (this.isDue ? this.gap : this.seldom)) this.ask();
  }
}
