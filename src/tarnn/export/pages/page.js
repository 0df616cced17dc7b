/* What the pages share: the model of this folder, sizes in words, and where trouble is told. */

import { load } from "./tarnn.js";

export const at = (id) => document.getElementById(id);

/** Open the model of this folder, and put its facts into the page; null where that failed, and the page says why. */
export async function open() {
  try {
    const about = await (await fetch(new URL("about.json", import.meta.url))).json();
    const model = await load(new URL("model.tarnn", import.meta.url), {
      progress: (bytes, all) => say(`Fetching the model: ${size(bytes)}${all ? ` of ${size(all)}` : ""}`),
    });
    say(`${about.parameters.toLocaleString("en")} parameters in ${about.weights}, ${size(about.bytes)}. All of it runs on this page.`);
    return { about, model };
  } catch (error) {
    return trouble(error), null;
  }
}

export function say(text) { at("about").textContent = text; }

export function trouble(error) {
  at("trouble").textContent = `This page can't run: ${error.message}`;
  say("");
}

/** 68 KB, 1.2 MB: in thousands. */
export function size(bytes) {
  const units = ["bytes", "KB", "MB", "GB"];
  let i = 0, x = bytes;
  for (; x >= 999.5 && i < units.length - 1; ++i) x /= 1000;
  return `${i && x < 10 ? x.toFixed(1) : Math.round(x)} ${units[i]}`;
}
