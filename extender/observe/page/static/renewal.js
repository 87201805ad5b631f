// When to ask anew: at once where something has changed, and seldom where nothing has, for ages go on.

const LOOK_MS = 1000, SELDOM_MS = 30000;

export class Renewal {
  /** `ask` is called no more often than each `gap` milliseconds where something changes, and each `seldom` anyway. */
  constructor(ask, gap, seldom = SELDOM_MS) {
    Object.assign(this, { ask, gap, seldom, askedAt: 0, isDue: false });
    setInterval(() => this.look(), LOOK_MS);
  }

  isChanged() {
    this.isDue = true;
    this.look();
  }

  /** It is being asked, for whatever reason. */
  note() {
    this.askedAt = Date.now();
    this.isDue = false;
  }

  look() {
    if (!document.hidden && Date.now() - this.askedAt >= (this.isDue ? this.gap : this.seldom)) this.ask();
  }
}
