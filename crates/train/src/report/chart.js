'use strict';
// Line charts on a canvas. All charts of the page share one x axis, one range of it and one crosshair.

const view = { x: 'step', y: 'linear', smooth: 0.9, range: null, at: null };
const charts = [];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const el = (tag, props = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
};

const units = [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']];
function short(x, digits = 3) {
  if (x === null || x === undefined || !isFinite(x)) return '–';
  const size = Math.abs(x);
  for (const [unit, name] of units) if (size >= unit * 0.9995) return +(x / unit).toPrecision(digits) + name;
  if (size !== 0 && size < 1e-3) return x.toExponential(Math.max(0, digits - 2)).replace('e-', 'e−');
  return String(+x.toPrecision(digits));
}
const loss = x => x === null || !isFinite(x) ? '–' : x >= 1e4 ? short(x) : x.toFixed(4);

// Round numbers between two ends.
function ticks(from, to, count) {
  const raw = (to - from) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw) || raw;
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9 && found.length < 40; i++) found.push(i * step);
  return found;
}
function logTicks(from, to) {
  const found = [];
  for (let p = Math.floor(Math.log10(from)); p <= Math.ceil(Math.log10(to)); p++)
    for (const f of [1, 2, 3, 5]) if (f * 10 ** p >= from && f * 10 ** p <= to) found.push(f * 10 ** p);
  if (found.length < 3) return ticks(from, to, 4).filter(t => t > 0);
  return found.length > 7 ? found.filter(t => /^[1]/.test(t.toExponential())) : found;
}

// An exponential mean over both sides of each value, so that a steep curve is not drawn too late. Gaps stay gaps.
function smoothed(values, keep) {
  const sums = new Float64Array(values.length), weights = new Float64Array(values.length);
  for (const back of [false, true]) for (let n = 0, sum = 0, weight = 0; n < values.length; n++) {
    const i = back ? values.length - 1 - n : n;
    if (values[i] === null) continue;
    sums[i] += sum = keep * sum + values[i];
    weights[i] += weight = keep * weight + 1;
  }
  return values.map((v, i) => v === null ? null : (sums[i] - v) / (weights[i] - 1));
}

// The place of the value nearest to x in an ascending list.
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return high >= 0 && Math.abs(xs[high] - x) <= Math.abs(xs[low] - x) ? high : low;
}

// Range of x that is shown.
function shown() {
  return view.range || [0, Math.max(1, view.x === 'step' ? data.state.step : data.state.tokens)];
}

// A canvas's context with the axes' geometry, cleared and in device pixels.
function surface(canvas, height, left = 46) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + 'px';
  const g = canvas.getContext('2d');
  g.scale(ratio, ratio);
  g.font = '11px system-ui, sans-serif';
  const box = { left, right: width - 8, top: 8, bottom: height - 20 };
  const [from, to] = shown();
  const px = x => box.left + (x - from) / (to - from) * (box.right - box.left);
  return { g, box, px, from, to };
}

function xAxis({ g, box, px, from, to }) {
  g.fillStyle = css('--soft');
  g.textBaseline = 'top';
  const marks = ticks(from, to, (box.right - box.left) / 65);
  for (const t of marks) {
    const label = short(t, 4), half = g.measureText(label).width / 2;
    g.textAlign = 'left';
    g.fillText(label, Math.min(Math.max(px(t) - half, box.left - 8), box.right + 6 - 2 * half), box.bottom + 6);
  }
  return marks;
}

function crosshair({ g, box, px, from, to }) {
  if (view.at === null || view.at < from || view.at > to) return;
  g.strokeStyle = css('--soft');
  g.lineWidth = 1;
  g.setLineDash([3, 3]);
  g.beginPath();
  g.moveTo(px(view.at), box.top);
  g.lineTo(px(view.at), box.bottom);
  g.stroke();
  g.setLineDash([]);
}

// spec: title, about, size ('wide', 'half', ''), height, log (follows the switch), zero (axis from 0), format, series().
// A series: name, color, x (by axis), y; and if wanted min and max (a band), faint, dots, hide (not in the legend).
function lineChart(parent, spec) {
  const canvas = el('canvas', { tabIndex: 0 }), legend = el('div', { className: 'legend' });
  canvas.setAttribute('role', 'img');
  parent.append(el('div', { className: `card ${spec.size || ''}` },
    el('header', {}, el('h3', { textContent: spec.title }), el('span', { className: 'about', textContent: spec.about || '' })),
    legend, canvas));
  const chart = { canvas, draw: () => drawLines(canvas, legend, spec) };
  pointer(canvas);
  charts.push(chart);
}

// Ends of the y axis for what is in the range of x.
function extent(series, log, from, to, zero) {
  let low = Infinity, high = -Infinity;
  for (const s of series) for (const ys of s.min ? [s.min, s.max] : [s.y]) for (let i = 0; i < ys.length; i++) {
    const v = ys[i], x = s.x[view.x][i];
    if (v === null || x < from || x > to || (log && v <= 0)) continue;
    low = Math.min(low, v);
    high = Math.max(high, v);
  }
  if (low > high) return null;
  if (log) return low === high ? [low / 1.1, high * 1.1] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [zero ? Math.min(0, low) : low - pad, high + pad];
}

function drawLines(canvas, legend, spec) {
  const series = spec.series(), log = spec.log && view.y === 'log', format = spec.format || short;
  const area = surface(canvas, spec.height || 170), { g, box, from, to } = area;
  const ends = extent(series, log, from, to, spec.zero && !log);
  const scale = log ? Math.log : v => v;
  const py = v => box.bottom - (scale(v) - scale(ends[0])) / (scale(ends[1]) - scale(ends[0])) * (box.bottom - box.top);
  g.lineWidth = 1;
  xAxis(area);
  g.textAlign = 'right';
  g.textBaseline = 'middle';
  for (const t of !ends ? [] : log ? logTicks(...ends) : ticks(...ends, (box.bottom - box.top) / 40)) {
    g.strokeStyle = css('--grid');
    g.beginPath();
    g.moveTo(box.left, Math.round(py(t)) + 0.5);
    g.lineTo(box.right, Math.round(py(t)) + 0.5);
    g.stroke();
    g.fillStyle = css('--soft');
    g.fillText((spec.tick || short)(t), box.left - 6, py(t));
  }
  g.save();
  g.beginPath();
  g.rect(box.left - 4, box.top - 4, box.right - box.left + 8, box.bottom - box.top + 4);
  g.clip();
  if (ends) for (const s of series) drawSeries(g, s, area.px, py, log);
  if (spec.marks) drawMarks(area, spec.marks());
  g.restore();
  crosshair(area);
  readout(canvas, legend, spec, series, ends && { g, px: area.px, py, log, from, to }, format);
}

function drawSeries(g, s, px, py, log) {
  const xs = s.x[view.x], ok = v => v !== null && (!log || v > 0);
  g.strokeStyle = g.fillStyle = s.color;
  if (s.min) {
    g.globalAlpha = 0.18;
    for (let i = 0; i < xs.length; i++) if (ok(s.min[i])) {
      const left = px(i ? xs[i - 1] : xs[i]), high = py(s.max[i]);
      g.fillRect(left, high, Math.max(1, px(xs[i]) - left), Math.max(1, py(s.min[i]) - high));
    }
  }
  g.globalAlpha = s.faint ? 0.35 : 1;
  g.lineWidth = s.faint ? 1 : 1.75;
  g.lineJoin = 'round';
  g.beginPath();
  for (let i = 0, pen = false; i < xs.length; i++) {
    if (!ok(s.y[i])) { pen = s.dots && pen; continue; }
    if (pen) g.lineTo(px(xs[i]), py(s.y[i])); else g.moveTo(px(xs[i]), py(s.y[i]));
    // A value between two gaps would have no line.
    if (!pen && !ok(s.y[i + 1] === undefined ? null : s.y[i + 1])) g.rect(px(xs[i]) - 0.5, py(s.y[i]) - 0.5, 1, 1);
    pen = true;
  }
  g.stroke();
  // Dots that touch each other would hide the line.
  const apart = xs.length > 1 ? (px(xs.at(-1)) - px(xs[0])) / (xs.length - 1) : Infinity;
  if (s.dots && apart > 9) for (let i = 0; i < xs.length; i++) if (ok(s.y[i])) disc(g, px(xs[i]), py(s.y[i]), 3.5, s.color);
  g.globalAlpha = 1;
}

function disc(g, x, y, radius, color) {
  g.fillStyle = color;
  g.strokeStyle = css('--card');
  g.lineWidth = 1.5;
  g.beginPath();
  g.arc(x, y, radius, 0, 7);
  g.fill();
  g.stroke();
}

// Small triangles on the axis.
function drawMarks({ g, box, px }, xs) {
  g.fillStyle = css('--bad');
  for (const x of xs) {
    g.beginPath();
    g.moveTo(px(x), box.bottom - 7);
    g.lineTo(px(x) - 4, box.bottom);
    g.lineTo(px(x) + 4, box.bottom);
    g.fill();
  }
}

// The legend says the values under the crosshair, or the latest ones.
function readout(canvas, legend, spec, series, area, format) {
  const said = [];
  legend.replaceChildren();
  for (const s of series) {
    if (s.hide || !s.y.length) continue;
    const xs = s.x[view.x];
    let at = view.at === null ? xs.length - 1 : nearest(xs, view.at);
    while (view.at === null && at > 0 && s.y[at] === null) at--;
    const value = s.y[at];
    const text = value === null ? '–' : format(value);
    legend.append(el('span', {}, el('i', { className: s.dots ? 'dot' : '', style: `background:${s.color}` }),
      `${s.name} `, el('b', { textContent: text })));
    said.push(`${s.name} ${text}`);
    if (view.at !== null && area && value !== null && (!area.log || value > 0) && xs[at] >= area.from && xs[at] <= area.to)
      disc(area.g, area.px(xs[at]), area.py(value), 3.5, s.color);
  }
  if (!said.length) legend.textContent = 'nothing yet';
  canvas.setAttribute('aria-label', `${spec.title}. ${view.at === null ? 'Latest' : 'At ' + view.x + ' ' + view.at}: ${said.join(', ')}`);
}

let waiting = 0;
function redraw() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => {
    charts.forEach(chart => chart.draw());
    const { step, tokens } = data.scalars, place = view.at === null ? -1 : nearest(data.scalars[view.x], view.at);
    document.getElementById('at').textContent = place < 0 ? '' : `step ${step[place].toLocaleString('en')}, ${short(tokens[place])} tokens`;
  });
}

// Hover and arrow keys move the crosshair; a sideways drag with the mouse chooses a range, a double click takes it back.
function pointer(canvas) {
  let pressed = null;
  const at = event => {
    const [from, to] = shown(), left = 46, width = canvas.clientWidth - left - 8;
    return from + Math.min(1, Math.max(0, (event.offsetX - left) / width)) * (to - from);
  };
  const snap = x => { const xs = data.scalars[view.x]; return xs.length ? xs[nearest(xs, x)] : null; };
  canvas.addEventListener('pointermove', event => { view.at = snap(at(event)); redraw(); });
  canvas.addEventListener('pointerleave', () => { view.at = null; redraw(); });
  canvas.addEventListener('pointerdown', event => { pressed = event.pointerType === 'mouse' ? at(event) : null; });
  canvas.addEventListener('pointerup', event => {
    const [from, to] = shown(), ends = [pressed, at(event)].sort((a, b) => a - b);
    if (pressed !== null && ends[1] - ends[0] > (to - from) / 40) zoom(ends);
    pressed = null;
  });
  canvas.addEventListener('dblclick', () => zoom(null));
  canvas.addEventListener('keydown', event => {
    const xs = data.scalars[view.x], move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === 'Escape') view.at = null;
    else if (move && xs.length) {
      const now = view.at === null ? xs.length - 1 : nearest(xs, view.at) + move;
      view.at = xs[Math.min(xs.length - 1, Math.max(0, now))];
    } else return;
    event.preventDefault();
    redraw();
  });
  canvas.addEventListener('blur', () => { view.at = null; redraw(); });
}
