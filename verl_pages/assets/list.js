// A list of any length: the document contains only the rows in view and a few around them.
const ROW_HEIGHT = 64;

// makeRow(place) promises a row, open(place) shows what is chosen. The element of the list scrolls; `space` is inside it.
function rowList(list, space, makeRow, open) {
  const self = { count: 0, chosen: 0 };
  let latest = 0;

  self.draw = async () => {
    const drawn = ++latest;
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(self.count, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + 4);
    const rows = await Promise.all(Array.from({ length: Math.max(0, last - first) }, (_, i) => makeRow(first + i)));
    if (drawn !== latest) return;
    rows.forEach((row, i) => {
      const place = first + i;
      const facts = { role: "option", id: `item-${place}`, "aria-selected": place === self.chosen, "aria-posinset": place + 1, "aria-setsize": self.count };
      for (const [name, value] of Object.entries(facts)) row.setAttribute(name, String(value));
      row.style.top = `${place * ROW_HEIGHT}px`;
      row.addEventListener("click", () => self.choose(place));
    });
    space.replaceChildren(...rows);
    if (self.count) list.setAttribute("aria-activedescendant", `item-${self.chosen}`);
    else list.removeAttribute("aria-activedescendant");
  };

  self.show = (count, place = 0) => {
    self.count = count;
    space.style.height = `${count * ROW_HEIGHT}px`;
    list.scrollTop = 0;
    return self.choose(place);
  };

  self.choose = async (place) => {
    self.chosen = Math.max(0, Math.min(place, self.count - 1));
    const top = self.chosen * ROW_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
    await Promise.all([self.draw(), open(self.chosen)]);
  };

  let drawing = false;
  list.addEventListener("scroll", () => {
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => { drawing = false; self.draw(); });
  });
  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    self.choose(self.chosen + moves[event.key]);
  });
  return self;
}

// A listener for keys of the whole page; what is typed into a field does nothing.
function shortcuts(actions) {
  return (event) => {
    const typing = event.target.closest && event.target.closest("input, select, textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  };
}
