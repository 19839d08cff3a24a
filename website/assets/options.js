// Keeps an option such as --out on one line: browsers break a line after a hyphen.
function keepOptions(code) {
  if (code.childElementCount) return;
  code.innerHTML = code.innerHTML.replace(/(^|\s)(-{1,2}\w[\w-]*)/g, '$1<span class="option">$2</span>');
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(":not(pre) > code").forEach(keepOptions));
