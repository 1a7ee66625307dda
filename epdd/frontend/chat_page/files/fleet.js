// The fleet as the daemon reports it once a second, while the page is visible.

import * as api from "./api.js";
import { by, make, say } from "./dom.js";
import { count, duration, number, percent, quantity, seconds, size } from "./format.js";
import { Plot } from "./plot.js";

const EVERY_MS = 1000;
const RATE_S = 5; // that requests per second are averaged over

export class Fleet {
  // `locked` is called on a 401, `said` with changes for screen readers.
  constructor(locked, said) {
    this.locked = locked;
    this.said = said;
    this.samples = [];
    this.rows = new Map();
    this.plots = {
      requests: new Plot("Requests per second"),
      first: new Plot("First token after", { dots: true, show: seconds }),
      tokens: new Plot("Tokens per second"),
    };
    by("plots").prepend(...Object.values(this.plots).map((plot) => plot.element));
    document.addEventListener("visibilitychange", () => this.tick());
  }

  // Polls the status.
  async tick() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    this.timer = setTimeout(() => this.tick(), EVERY_MS);
    if (this.asking) return;
    this.asking = true;
    const status = await api.status().catch((error) => this.away(error)).finally(() => { this.asking = false; });
    if (status) this.show(status);
  }

  away(error) {
    const closed = error.status === 401;
    if (closed) {
      clearTimeout(this.timer); // until there is one
      this.locked();
    }
    this.state("away", closed ? "needs an API key" : error.message);
    by("fleet").classList.add("old");
  }

  state(state, text) {
    const shown = by("state");
    if (shown.dataset.state !== state && shown.dataset.state !== "unknown") this.said(`Server: ${text}`);
    shown.dataset.state = state;
    say(shown, text);
  }

  show(status) {
    by("fleet").classList.remove("old");
    this.state(status.state, status.state);
    say(by("model"), status.model?.name ?? "");
    document.title = status.model?.name ? `${status.model.name} – epdd` : "epdd";
    const emulated = status.emulated;
    by("emulated").hidden = !emulated;
    if (emulated) {
      const answers = emulated.answers === "demo" ? "answers are the demo model's" : "answers mean nothing";
      const speed = (emulated.scale ?? 1) === 1 ? "" : `, ${number(emulated.scale)} times as fast`;
      say(by("emulated"), `Emulated devices: profile ${emulated.profile ?? "unknown"}${speed}; ${answers}.`);
      by("emulated").title = emulated.about ?? "";
    }
    this.table(by("encoders"), "Encoders", status.workers.filter((worker) => worker.role === "encoder"),
      ["Images/s", "Share", "of the patches encoded in the last minute"], (worker) => worker.share);
    this.table(by("decoders"), "Prefill and decode", status.workers.filter((worker) => worker.role === "pd"),
      ["Tokens/s", "KV", "memory for keys and values in use"],
      (worker) => (worker.kv_tokens ? worker.kv_used / worker.kv_tokens : null));
    this.budget(status.router ?? {});
    this.memory(status.arena ?? {}, status.cache ?? {});
    this.history(status);
  }

  table(place, title, workers, [rate, last, meaning], part) {
    if (!place.firstChild) {
      const heads = ["Worker", "State", "In flight", rate, last];
      place.append(make("table", {}, make("caption", { class: "unseen" }, `${title}; ${last}: ${meaning}`),
        make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
        make("tbody")));
    }
    const body = place.querySelector("tbody");
    const names = new Set(workers.map((worker) => worker.name));
    for (const row of [...body.rows]) {
      if (names.has(row.dataset.name)) continue;
      this.rows.delete(row.dataset.name);
      row.remove();
    }
    for (const worker of workers) {
      let row = this.rows.get(worker.name);
      if (!row) this.rows.set(worker.name, row = body.appendChild(newRow(worker.name)));
      fill(row, worker, part(worker));
    }
  }

  budget(router) {
    const { i_cpu: cpu = 0, i_gpu: gpu = 0, budget_cpu: budget, n_cpu, n_gpu } = router;
    const unit = router.unit ?? "patch";
    const bounded = typeof budget === "number";
    const scale = Math.max(cpu, gpu, bounded ? budget : 0) || 1;
    bar(by("bar-cpu"), [["cpu", cpu / scale]], budget ? budget / scale : null);
    bar(by("bar-gpu"), [["gpu", gpu / scale]]);
    say(by("in-flight-cpu"), bounded ? `${quantity(cpu)} of ${count(Math.round(budget), unit)}` : count(cpu, unit));
    say(by("in-flight-gpu"), n_gpu ? count(gpu, unit) : "no GPU encodes");
    const compared = n_cpu && n_gpu && router.ratio != null;
    say(by("ratio"), compared ? `R ${number(router.ratio)} ${router.ratio_source ?? ""}` : "");
    by("ratio").title = "how many CPU encoders do the work of one GPU encoder";
    const waiting = router.queue_jobs ?? 0;
    say(by("queue"), waiting
      ? `${count(waiting, "image")} queued, ${count(router.queue_cost, unit)}; `
        + `the oldest for ${seconds(router.oldest_s)}`
      : "No image is queued.");
  }

  memory(arena, cache) {
    const total = arena.bytes || 1;
    bar(by("bar-arena"), ["pinned", "cached"].map((kind) => [kind, (arena[`${kind}_bytes`] ?? 0) / total]));
    say(by("arena"), `${size(arena.pinned_bytes)} in use, ${size(arena.cached_bytes)} cached, of ${size(arena.bytes)}`
      + (arena.waiting ? `; ${count(arena.waiting, "request")} waiting for room` : ""));
    const looked = (cache.hits ?? 0) + (cache.misses ?? 0);
    say(by("cache"), `Cache: ${count(cache.entries ?? 0, "image")}`
      + (looked ? `, ${percent(cache.hits / looked)} of ${count(looked, "lookup")} hit` : ""));
  }

  history(status) {
    const requests = status.requests ?? {};
    const at = status.uptime_s ?? performance.now() / 1000;
    const sample = { at, ended: requests.completed ?? 0, firsts: requests.ttft_s?.count, waited: requests.ttft_s?.sum };
    const last = this.samples.at(-1);
    if (last && at < last.at) { // the daemon has restarted
      this.samples = [];
      Object.values(this.plots).forEach((plot) => plot.clear());
    } else if (last && at > last.at) {
      const then = this.samples.findLast((old) => old.at <= at - RATE_S) ?? this.samples[0];
      this.plots.requests.add(at, (sample.ended - then.ended) / (at - then.at));
      if (sample.firsts > last.firsts) {
        this.plots.first.add(at, (sample.waited - last.waited) / (sample.firsts - last.firsts));
      }
      this.plots.tokens.add(at, requests.tokens_per_s);
    }
    if (at !== last?.at) this.samples = [...this.samples.filter((old) => old.at > at - 2 * RATE_S), sample];
    Object.values(this.plots).forEach((plot) => plot.draw(at));
    const parts = [`${quantity(requests.running)} running`, `${quantity(requests.completed)} completed`];
    for (const name of ["failed", "rejected", "aborted"]) {
      if (requests[name]) parts.push(`${quantity(requests[name])} ${name}`);
    }
    say(by("totals"), `Requests: ${parts.join(", ")}. Up ${duration(status.uptime_s)}, epdd ${status.version ?? ""}.`);
  }
}

function newRow(name) {
  return make("tr", { "data-name": name },
    make("th", { scope: "row" }, make("i", { class: "swatch" }), make("span", {}, name), make("small")),
    make("td", { class: "state" }, make("span"), make("small")), make("td"), make("td"),
    make("td", { class: "part" }, make("span"), make("div", { class: "bar" })));
}

function fill(row, worker, part) {
  const [name, state, flight, rate, share] = row.cells;
  const device = worker.device ?? "";
  name.querySelector(".swatch").className = `swatch ${device === "cpu" ? "cpu" : "gpu"}`;
  say(name.querySelector("small"), worker.numa_node == null ? device : `${device}, NUMA ${worker.numa_node}`);
  const word = String(worker.state).toLowerCase();
  row.dataset.state = word;
  const loading = word === "starting" && worker.stage;
  say(state.firstChild, whole(loading ? `${worker.stage} ${percent(worker.progress)}` : word));
  say(state.lastChild, notes(worker).map(whole).join(", "));
  state.classList.toggle("slow", Boolean(worker.slow));
  say(flight, quantity(worker.in_flight));
  flight.title = worker.in_flight_cost ? `cost ${quantity(worker.in_flight_cost)}` : "";
  say(rate, number(worker.rate_per_s));
  say(share.firstChild, percent(part));
  share.lastChild.hidden = part == null;
  bar(share.lastChild, [[device === "cpu" ? "cpu" : "gpu", part ?? 0]]);
}

// Without line breaks between its words.
const whole = (text) => text.replaceAll(" ", "\u00a0");

function notes(worker) {
  const found = [];
  if (worker.slow) found.push(worker.slowness ? `slow ×${number(worker.slowness)}` : "slow");
  if (worker.restarts) found.push(count(worker.restarts, "restart"));
  return found;
}

// A bar of parts (of 1), and a tick where a limit is.
function bar(element, parts, tick = null) {
  const wanted = parts.length + (tick != null);
  while (element.children.length > wanted) element.lastChild.remove();
  while (element.children.length < wanted) element.append(make("i"));
  parts.forEach(([kind, share], index) => {
    element.children[index].className = kind;
    element.children[index].style.width = `${Math.min(100, 100 * share)}%`;
  });
  if (tick != null) {
    element.lastChild.className = "tick";
    element.lastChild.style.left = `${100 * tick}%`;
  }
}
