// When to refresh: soon after a change, and otherwise at long intervals, because ages grow.

const LOOK_MS = 1000, LONGEST_MS = 30000;

export class RefreshTimer {
  /** `refresh` is called at most every `gapMs` after changes, and every `longestMs` without one. */
  constructor(refresh, gapMs, longestMs = LONGEST_MS) {
    Object.assign(this, { refresh, gapMs, longestMs, requestedAt: 0, isDue: false });
    setInterval(() => this.look(), LOOK_MS);
  }

  isChanged() {
    this.isDue = true;
    this.look();
  }

  /** A request was sent, for any reason. */
  note() {
    this.requestedAt = Date.now();
    this.isDue = false;
  }

  look() {
    if (!document.hidden && Date.now() - this.requestedAt >= (this.isDue ? this.gapMs : this.longestMs)) this.refresh();
  }
}

/** A view that `refresh` fills while it is shown. */
export class RefreshedView {
  constructor(gapMs) {
    this.isShown = false;
    this.refreshTimer = new RefreshTimer(() => this.refresh(), gapMs);
  }

  setShown(isShown) {
    this.isShown = isShown;
    if (isShown) this.refresh();
  }

  isChanged() {
    this.refreshTimer.isChanged();
  }
}
