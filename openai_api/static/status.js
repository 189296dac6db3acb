// What the server does: phases while the model loads, and small plots from /metrics.

import { ApiError, health, metrics } from "./api.js";
import { byId, make } from "./elements.js";
import { text } from "./strings.js";

const SVG = "http://www.w3.org/2000/svg";
const POINTS = 90;
const WIDTH = 240;
const HEIGHT = 48;
const INTERVAL = 1000; // milliseconds

export class Status {
  constructor(store, onReady) {
    this.store = store;
    this.onReady = onReady;
    this.isReady = false;
    this.before = null;
    this.series = new Map(Object.keys(text.plots).map((name) => [name, []]));
    byId("open-status").addEventListener("click", () => {
      byId("status").showModal();
      this.poll();
    });
  }

  // Looks again until the server is ready, and then now and then.
  async watch() {
    const report = await health();
    this.show(report);
    const isReady = report?.status === "ok";
    if (isReady && !this.isReady) this.onReady();
    this.isReady = isReady;
    setTimeout(() => this.watch(), isReady ? 15_000 : 700);
  }

  show(report) {
    const banner = byId("banner");
    const line = describe(report);
    byId("status-line").textContent = line;
    banner.hidden = report?.status === "ok";
    if (banner.hidden) return;
    const phase = report?.phases?.at(-1);
    const bar = phase?.total ? [make("progress", { max: phase.total, value: phase.done, attributes: { "aria-label": line } })] : [];
    banner.replaceChildren(make("span", { textContent: line }), ...bar);
  }

  async poll() {
    if (!byId("status").open) return;
    try {
      this.take(await metrics(this.store.key));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      byId("status-line").textContent = error.message;
    }
    setTimeout(() => this.poll(), INTERVAL);
  }

  take(found) {
    const now = performance.now();
    const tokens = found.get("photoninfer_generation_tokens_total") ?? 0;
    const seconds = this.before ? (now - this.before.now) / 1000 : Infinity;
    const values = {
      running: found.get("photoninfer_requests_running") ?? 0,
      waiting: found.get("photoninfer_requests_waiting") ?? 0,
      cache: 100 * (found.get("photoninfer_kv_cache_usage_ratio") ?? 0),
      rate: (tokens - (this.before?.tokens ?? 0)) / seconds,
    };
    this.before = { now, tokens };
    const plots = Object.entries(text.plots).map(([name, label]) => {
      const series = this.series.get(name);
      series.push(values[name]);
      if (series.length > POINTS) series.shift();
      return plot(label, series, name === "cache" ? "%" : "");
    });
    byId("plots").replaceChildren(...plots);
  }
}

function describe(report) {
  if (!report) return text.unreachable;
  if (report.status === "failed") return text.loadingFailed(report.reason);
  const phase = report.phases?.at(-1);
  const share = phase?.total ? ` ${Math.floor((100 * phase.done) / phase.total)}%` : "";
  return {
    ok: text.ready, draining: text.draining, stuck: text.stuck, loading: text.loading(`${phase?.name ?? "…"}${share}`),
  }[report.status];
}

function plot(label, series, unit) {
  const top = Math.max(1, ...series);
  const x = (i) => (WIDTH * (i + POINTS - series.length)) / (POINTS - 1);
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 4) * value) / top;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", series.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  svg.append(line);
  const shown = series.at(-1).toLocaleString("en", { maximumFractionDigits: 1 });
  return make("figure", {}, make("figcaption", {}, make("span", { textContent: label }),
    make("b", { textContent: `${shown}${unit}` })), svg);
}
