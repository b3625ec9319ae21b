// What was told in the last minutes, and rates made of it.

const KEPT_S = 600;
const RATE_S = 9;

export class History {
  constructor() { this.samples = []; }

  // A daemon that was started anew counts from nothing, so its past says nothing.
  add(status) {
    const last = this.samples.at(-1);
    if (last && last.started !== status.started_at) this.samples = [];
    this.samples.push({
      at: status.started_at + status.up_s, started: status.started_at,
      counters: status.counters, tokens: status.asked_tokens,
    });
    const oldest = this.samples.at(-1).at - KEPT_S;
    while (this.samples[0].at < oldest) this.samples.shift();
  }

  // The sample that a rate at this place is measured from.
  before(place) {
    let first = place;
    while (first > 0 && this.samples[place].at - this.samples[first].at < RATE_S) first -= 1;
    return this.samples[first];
  }

  // Growth a second of what `of` finds in a sample.
  rate(of, place = this.samples.length - 1) {
    const now = this.samples[place];
    const then = now && this.before(place);
    return then && now.at > then.at ? Math.max(0, (of(now) - of(then)) / (now.at - then.at)) : 0;
  }

  counter(name, place) { return this.rate((sample) => sample.counters[name] ?? 0, place); }
}
