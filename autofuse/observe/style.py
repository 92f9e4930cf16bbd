"""Style: how the page of a report looks. Every rule is about `.autofuse`: a notebook has others.

Nothing is told by colour alone: each chip has a sign and words, each line an edge of its kind.
"""

STYLE = """
.autofuse {
  --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --rule: #d1d9e0; --shade: #f6f8fa;
  --link: #0550ae;
  --recorded: #116329; --recorded-shade: #dafbe1; --ended: #0550ae; --ended-shade: #ddf4ff;
  --eager: #7d4e00; --eager-shade: #fff3bf; --waits: #a40e26; --waits-shade: #ffe3e0;
  color-scheme: light dark; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif;
  box-sizing: border-box; max-width: 1120px; margin: 0 auto; padding: 24px;
}
@media (prefers-color-scheme: dark) {
  .autofuse {
    --paper: #0d1117; --ink: #e6edf3; --faint: #9aa4af; --rule: #3d444d; --shade: #161b22;
    --link: #79c0ff;
    --recorded: #7ee787; --recorded-shade: #12301e; --ended: #79c0ff; --ended-shade: #10294a;
    --eager: #f0c04c; --eager-shade: #352a0b; --waits: #ff938a; --waits-shade: #42171a;
  }
}
.autofuse *, .autofuse *::before { box-sizing: border-box; }
.autofuse h1 { font-size: 24px; line-height: 1.25; margin: 0; color: inherit; }
.autofuse header p { margin-top: 4px; }
.autofuse h2 { font-size: 18px; margin: 36px 0 10px; color: inherit; }
.autofuse h3 { font: 600 13px ui-monospace, monospace; margin: 20px 0 6px; color: inherit;
  overflow-wrap: anywhere; }
.autofuse p { margin: 10px 0; max-width: 75ch; color: inherit; }
.autofuse .faint { color: var(--faint); }
.autofuse a { color: var(--link); }
.autofuse code, .autofuse pre { font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; background: none; color: inherit; padding: 0; border: 0; }
.autofuse :focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }

.autofuse .figures { display: grid; gap: 10px; margin: 18px 0 0; padding: 0;
  grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); }
.autofuse .figures div { background: var(--shade); border: 1px solid var(--rule);
  border-radius: 8px; padding: 8px 12px; }
.autofuse .figures dt { color: var(--faint); font-size: 13px; font-weight: 400; }
.autofuse .figures dd { margin: 0; font-size: 20px; font-weight: 600;
  font-variant-numeric: tabular-nums; }

.autofuse table { width: 100%; border-collapse: collapse; margin: 0; font-size: inherit;
  table-layout: auto; }
.autofuse th, .autofuse td { text-align: left; vertical-align: top; padding: 8px 10px;
  border-bottom: 1px solid var(--rule); background: none; color: inherit; white-space: normal; }
.autofuse th { color: var(--faint); font-weight: 600; font-size: 13px; }
.autofuse .us { text-align: right; white-space: nowrap; width: 1%;
  font-variant-numeric: tabular-nums; }
.autofuse td.advised { overflow-wrap: anywhere; }

.autofuse .source { list-style: none; margin: 0; padding: 6px 0; border: 1px solid var(--rule);
  border-radius: 8px; overflow: hidden; }
.autofuse .source li { display: grid; align-items: baseline; margin: 0; gap: 2px 12px;
  grid-template-columns: 4ch minmax(0, 1fr) fit-content(56%);
  padding: 1px 8px 1px 4px; border-left: 4px solid transparent; }
.autofuse .source li.recorded { border-left: 4px solid var(--recorded); }
.autofuse .source li.ended { border-left: 4px double var(--ended);
  background: var(--ended-shade); }
.autofuse .source li.eager { border-left: 4px dashed var(--eager);
  background: var(--eager-shade); }
.autofuse .source li.waits { border-left: 4px dotted var(--waits);
  background: var(--waits-shade); }
.autofuse .number { text-align: right; color: var(--faint); user-select: none;
  font: 13px/1.55 ui-monospace, monospace; }
.autofuse .source code { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  tab-size: 4; }
.autofuse .chips { display: flex; flex-wrap: wrap; gap: 4px; justify-content: flex-end; }
.autofuse .chip { display: inline-block; font-size: 12px; line-height: 18px; padding: 0 7px;
  border: 1px solid currentColor; border-radius: 9px; overflow-wrap: anywhere;
  background: var(--paper); }
.autofuse .chip.recorded { color: var(--recorded); }
.autofuse .chip.ended { color: var(--ended); }
.autofuse .chip.eager { color: var(--eager); }
.autofuse .chip.waits { color: var(--waits); }
.autofuse .legend { display: flex; flex-wrap: wrap; gap: 6px 18px; list-style: none; margin: 0;
  padding: 0; font-size: 13px; }
.autofuse .legend li { margin: 0; }

.autofuse details { border: 1px solid var(--rule); border-radius: 8px; margin: 0 0 8px;
  background: var(--paper); }
.autofuse summary { cursor: pointer; padding: 8px 12px; border-radius: 8px; }
.autofuse summary code { overflow-wrap: anywhere; }
.autofuse summary:hover { background: var(--shade); }
.autofuse .op { display: inline-block; font: 12px/20px ui-monospace, monospace; padding: 0 6px;
  margin: 1px 0; border-radius: 4px;
  background: var(--shade); border: 1px solid var(--rule); }
.autofuse .op.stored { border: 2px solid var(--recorded); line-height: 18px; font-weight: 600; }
.autofuse .told { display: block; color: var(--faint); font-size: 13px;
  overflow-wrap: anywhere; }
.autofuse .inside { padding: 4px 12px 12px; border-top: 1px solid var(--rule); }
.autofuse .facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px;
  margin: 8px 0 12px; }
.autofuse .facts dt { color: var(--faint); font-weight: 400; }
.autofuse .facts dd { margin: 0; overflow-wrap: anywhere; }
.autofuse .kernel { margin: 0; }
.autofuse .kernel pre { margin: 0; padding: 10px 12px; overflow-x: auto; white-space: pre;
  border-top: 1px solid var(--rule); background: var(--shade); tab-size: 4; }
@media (max-width: 640px) {
  .autofuse { padding: 14px; }
  .autofuse .source li { grid-template-columns: 4ch minmax(0, 1fr); gap: 2px 8px;
    padding-left: 0; }
  .autofuse .chips { grid-column: 2; justify-content: flex-start; padding-bottom: 3px; }
  .autofuse .facts { grid-template-columns: 1fr; }
  .autofuse .facts dd { margin-bottom: 6px; }
}
@media print { .autofuse details { break-inside: avoid; } }
"""
PAGE = "html { background: #ffffff; } body { margin: 0; } " + (
    "@media (prefers-color-scheme: dark) { html { background: #0d1117; } }"
)
