"""The page's style: light, dark and paper, from a phone's width on."""

from typing import Final

_LIGHT: Final = """--ink: #1c2733; --soft: #5c6b7a; --paper: #ffffff; --line: #dfe5ea;
  --bad: #b3261e; --c0: #6b7785; --c1: #0b8573; --c2: #c2610c; --c3: #7a4fd0;"""
_DARK: Final = """--ink: #e6edf3; --soft: #9aa7b4; --paper: #10161d; --line: #2a343f;
  --bad: #ff8a80; --c0: #94a1af; --c1: #38c6b2; --c2: #f0913f; --c3: #b08cff;"""

STYLE: Final = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ color-scheme: light; {_LIGHT} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 66rem; margin: 0 auto; padding: 1.2rem 1rem 3rem;
  font-variant-numeric: tabular-nums; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0; }}
h2 {{ font-size: 1.25rem; margin: 2.2rem 0 .3rem; }}
h3 {{ font-size: 1rem; margin: 1.4rem 0 .2rem; }}
p {{ margin: .2rem 0 .6rem; max-width: 48rem; }}
.soft {{ color: var(--soft); font-size: .9rem; }}
ul.first {{ padding-left: 1.1rem; font-size: 1.05rem; }}
ul.first li {{ margin: .25rem 0; overflow-wrap: anywhere; }}
ul.first li.bad {{ color: var(--bad); font-weight: 600; }}
.charts {{ display: grid; gap: .4rem 2.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }}
figure {{ margin: 0; min-width: 0; break-inside: avoid; }}
figcaption {{ font-size: .85rem; display: flex; flex-wrap: wrap; gap: 0 1rem;
  align-items: baseline; }}
figcaption h3 {{ flex-basis: 100%; margin: .8rem 0 0; overflow-wrap: anywhere; }}
.key b {{ font-weight: 600; }}
svg.plot {{ display: block; overflow: visible; margin: .7rem 0 2.7rem 3.7rem;
  width: calc(100% - 4.3rem); }}
svg.plot text {{ fill: var(--soft); font: 12px system-ui, sans-serif; }}
svg.plot .left {{ text-anchor: end; }} svg.plot .below {{ text-anchor: middle; }}
svg.plot .cross {{ fill: var(--bad); text-anchor: middle; font-size: 15px; font-weight: 700; }}
path {{ fill: none; vector-effect: non-scaling-stroke; }}
path.grid {{ stroke: var(--line); stroke-width: 1; }}
path.line, path.median {{ stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }}
path.zero {{ stroke: var(--ink); stroke-width: 1.2; }}
path.span {{ stroke-width: 6; opacity: .4; }}
path.dots {{ stroke: var(--c); stroke-width: 4.5; stroke-linecap: round; opacity: .55; }}
path.knots {{ stroke: var(--c); stroke-width: 8; stroke-linecap: round; }}
path.band {{ fill: var(--c); opacity: .09; }}
path.noise {{ fill: var(--soft); opacity: .22; }}
circle {{ fill: var(--c); }}
circle.ring {{ fill: var(--paper); fill-opacity: .6; stroke: var(--c); stroke-width: 1.6; }}
.c0 {{ --c: var(--c0); }} .c1 {{ --c: var(--c1); }} .c2 {{ --c: var(--c2); }}
.c3 {{ --c: var(--c3); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; }}
th, td {{ text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 500; }} .number {{ text-align: right; }}
dl {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem;
  font-size: .9rem; margin: .2rem 0; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
pre {{ font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0;
  padding: .6rem .8rem; border: 1px solid var(--line); border-radius: 4px; }}
@media (max-width: 30rem) {{ body {{ padding: .8rem .7rem 2rem; }} }}
@media print {{ body {{ font-size: 12px; max-width: none; padding: 0; }}
  .wide {{ overflow: visible; }} th, td {{ white-space: normal; }} }}
@media (forced-colors: active) {{ svg {{ forced-color-adjust: none; }} }}
"""
