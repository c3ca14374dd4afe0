// A virtual list: only the visible rows exist, and pages are fetched when they become visible.
const PAGE = 100;

export class VirtualList {
  constructor(box, spacer, rowHeight, fetchPage, drawRow, onChoose) {
    Object.assign(this, { box, spacer, rowHeight, fetchPage, drawRow, onChoose });
    this.generation = 0;
    this.clear();
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  clear() {
    this.generation += 1;
    this.total = 0;
    this.pages = new Map();
    this.chosen = -1;
    this.drawn = new Map();
    this.spacer.replaceChildren();
  }

  reset(total, firstRows) {
    this.clear();
    this.total = total;
    this.pages.set(0, firstRows);
    this.spacer.style.height = `${total * this.rowHeight}px`;
    this.box.scrollTop = 0;
    this.draw();
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  async load(page) {
    if (this.pages.has(page)) return;
    this.pages.set(page, []);
    const generation = this.generation;
    const rows = await this.fetchPage(page * PAGE, PAGE);
    if (generation !== this.generation) return;
    if (rows === null) { this.pages.delete(page); return; }
    this.pages.set(page, rows);
    for (const [index, element] of this.drawn) {
      if (Math.floor(index / PAGE) === page) { element.remove(); this.drawn.delete(index); }
    }
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - 4);
    const last = Math.min(this.total - 1, Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.rowHeight) + 4);
    for (const [index, element] of this.drawn) {
      if (index < first || index > last) { element.remove(); this.drawn.delete(index); }
    }
    for (let index = first; index <= last; index += 1) {
      const row = this.row(index);
      if (!row) this.load(Math.floor(index / PAGE));
      if (this.drawn.has(index)) continue;
      const element = document.createElement("div");
      element.className = "row";
      element.id = `row-${index}`;
      element.setAttribute("role", "option");
      element.setAttribute("aria-setsize", this.total);
      element.setAttribute("aria-posinset", index + 1);
      element.style.transform = `translateY(${index * this.rowHeight}px)`;
      if (row) this.drawRow(element, row); else element.textContent = "…";
      element.addEventListener("click", () => this.choose(index));
      this.drawn.set(index, element);
      this.spacer.append(element);
    }
    this.mark();
  }

  mark() {
    for (const [index, element] of this.drawn) element.setAttribute("aria-selected", index === this.chosen);
    if (this.drawn.has(this.chosen)) this.box.setAttribute("aria-activedescendant", `row-${this.chosen}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  async choose(index) {
    if (index < 0 || index >= this.total) return;
    this.chosen = index;
    const top = index * this.rowHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.rowHeight > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + this.rowHeight - this.box.clientHeight;
    if (!this.row(index)) await this.load(Math.floor(index / PAGE));
    this.draw();
    if (this.chosen === index && this.row(index)) this.onChoose(this.row(index));
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight) - 1);
    const target = { ArrowDown: this.chosen + 1, ArrowUp: Math.max(0, this.chosen - 1), PageDown: Math.min(this.total - 1, this.chosen + page),
                     PageUp: Math.max(0, this.chosen - page), Home: 0, End: this.total - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    this.choose(target);
  }
}
