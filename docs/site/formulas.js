// Typesets the formulas of a page: arithmatex leaves \(...\) or \[...\] in elements of its own.
for (const element of document.querySelectorAll(".arithmatex")) {
  const source = element.textContent.trim();
  katex.render(source.slice(2, -2), element, { displayMode: source.startsWith("\\["), throwOnError: true });
}
