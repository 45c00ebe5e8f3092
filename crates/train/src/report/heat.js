// Maps of the experts' load: a row an expert, a column a bucket of steps, coloured by the share of an equal load.

const LEVELS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/';
// How far a level is from an equal share, in doublings, -2 to 2: the levels are closer around an equal share.
const doublings = level => Math.sign(level - 32) * 2 * Math.min(1, Math.abs(level - 32) / 31) ** 2;
const times = char => 2 ** doublings(LEVELS.indexOf(char));
const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
const mix = (a, b, t) => a.map((v, i) => v + (b[i] - v) * t);

// A colour a level, from --low over --even to --high, which are full at 4 times off and beyond.
function palette() {
  const [low, even, high] = ['--low', '--even', '--high'].map(name => rgb(css(name)));
  return [...LEVELS].map((_, i) => {
    const far = Math.abs(doublings(i)) / 2;
    return `rgb(${mix(even, i < 32 ? low : high, far).map(Math.round)})`;
  });
}

function heatMap(parent, layer) {
  const canvas = el('canvas', { tabIndex: 0 }), legend = el('div', { className: 'legend' });
  canvas.setAttribute('role', 'img');
  parent.append(el('div', { className: 'card' }, el('header', {}, el('h3', { textContent: `Layer ${layer}` }), legend), canvas));
  pointer(canvas);
  let row = null;
  canvas.addEventListener('pointermove', event => {
    const height = canvas.clientHeight - 28, experts = data.load.experts[layer];
    row = Math.min(experts - 1, Math.max(0, Math.floor((event.offsetY - 8) / height * experts)));
  });
  canvas.addEventListener('pointerleave', () => { row = null; });
  charts.push({ canvas, draw: () => drawHeat(canvas, legend, layer, row) });
}

function drawHeat(canvas, legend, layer, row) {
  const { experts: all, layers, ...axis } = data.load, experts = all[layer], cells = layers[layer], xs = axis[view.x];
  const area = surface(canvas, Math.max(96, Math.min(240, experts * 7)) + 28), { g, box, px } = area;
  const height = (box.bottom - box.top) / experts, colors = palette();
  g.save();
  g.beginPath();
  g.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  g.clip();
  for (let c = 0; c < xs.length; c++) {
    const left = Math.floor(px(c ? xs[c - 1] : 0)), right = Math.ceil(px(xs[c]));
    if (right < box.left || left > box.right) continue;
    for (let e = 0; e < experts; e++) {
      const level = LEVELS.indexOf(cells[e * xs.length + c]);
      if (level < 0) continue;
      g.fillStyle = colors[level];
      const top = Math.round(box.top + e * height);
      g.fillRect(left, top, right - left, Math.round(box.top + (e + 1) * height) - top);
    }
  }
  g.restore();
  xAxis(area);
  g.textAlign = 'right';
  g.textBaseline = 'middle';
  const every = Math.max(1, Math.ceil(experts / 6));
  for (let e = 0; e < experts; e += every) g.fillText(String(e), box.left - 6, box.top + (e + 0.5) * height);
  crosshair(area);
  // A bucket's x is its end: the column under the crosshair is the first that reaches it.
  const column = view.at === null ? xs.length - 1 : Math.max(0, xs.findIndex(x => x >= view.at));
  const loads = Array.from({ length: experts }, (_, e) => times(cells[e * xs.length + column]));
  const most = loads.indexOf(Math.max(...loads)), least = loads.indexOf(Math.min(...loads));
  const say = e => `expert ${e}: ${loads[e].toFixed(2)}×`;
  legend.textContent = row !== null && view.at !== null ? say(row) : `${say(least)} – ${say(most)}`;
  canvas.setAttribute('aria-label', `Expert load of layer ${layer}, relative to an equal share: least ${say(least)}, most ${say(most)}`);
}
