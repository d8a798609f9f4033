(function start(image, tries) {
  const panel = image.closest('.lossless-lab-panel');
  if (!panel) { if (tries) setTimeout(start, 100, image, tries - 1); return; }
  const say = () => {
    for (const focusable of panel.querySelectorAll('select, input, button, [tabindex]'))
      focusable.setAttribute('data-lm-suppress-shortcuts', 'true');
    for (const slider of panel.querySelectorAll('.widget-hslider')) {
      const handle = slider.querySelector('.noUi-handle');
      const shown = slider.querySelector('.widget-readout')?.textContent;
      if (handle && shown && handle.getAttribute('aria-valuetext') !== shown) {
        handle.setAttribute('aria-valuetext', shown);
        handle.setAttribute('aria-label', slider.querySelector('.widget-label')?.textContent);
      }
    }
    for (const picture of panel.querySelectorAll('img.widget-image'))
      if (!picture.alt) picture.alt = 'Chart of the figures that the text above it gives';
  };
  new MutationObserver(say).observe(panel, {
    subtree: true, childList: true, characterData: true, attributeFilter: ['aria-valuetext'],
  });
  say();
})(this, 100)
