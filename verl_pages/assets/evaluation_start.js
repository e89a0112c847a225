byId("legend").append(...data.legend.map((text) => el("span", {}, text)));
byId("limits").textContent = data.limits;
byId("limits").hidden = !data.limits;
figureButtons();
showResponses();
showCurves();
if ("DecompressionStream" in window) {
  startBrowser().then(() => document.documentElement.setAttribute("data-ready", ""));
} else {
  trouble("This browser cannot unpack the responses, because it lacks DecompressionStream. Browsers since 2023 have it.");
}
