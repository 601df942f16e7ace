// Text of a model as safe HTML. It may not run, load or change anything by itself.
import { marked } from "./vendor/marked.js";

const TAGS = ["p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5", "h6",
  "table", "thead", "tbody", "tr", "th", "td", "a", "sup", "sub"];

// HTML in an answer is shown as its letters. An image is shown as its address, for it would load by itself.
const escape = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: (token) => escape(token.text),
    image: (token) => `${escape(token.text || "image")} (<code>${escape(token.href)}</code>)`,
  },
});

export function toHtml(text) {
  const clean = window.DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "start", "align"], ALLOWED_URI_REGEXP: /^https?:\/\//i, RETURN_DOM_FRAGMENT: true,
  });
  for (const link of clean.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) { link.replaceWith(...link.childNodes); continue; }
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    // A link says where it goes before it is used.
    link.title = link.getAttribute("href");
  }
  // A long line scrolls, also for a person without a mouse.
  for (const code of clean.querySelectorAll("pre")) { code.tabIndex = 0; code.setAttribute("aria-label", "Code"); code.setAttribute("role", "region"); }
  const holder = document.createElement("div");
  holder.append(clean);
  return holder.innerHTML;
}
