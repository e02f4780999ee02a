// Browsers give no workers to pages that are opened from the disk: the search runs in a hidden
// frame instead, with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc =
        "<script>const native = window.postMessage.bind(window);" +
        "window.postMessage = (data, to) =>" +
        " to === undefined ? parent.postMessage({ found: data }, '*') : native(data, to);</script>" +
        `<script src="${url}"></script>`;
      frame.addEventListener("load", () => {
        this.frame = frame;
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      });
      window.addEventListener("message", (event) => {
        if (event.source === frame.contentWindow && event.data?.found !== undefined)
          this.dispatchEvent(new MessageEvent("message", { data: event.data.found }));
      });
      document.body.append(frame);
    }

    postMessage(data) {
      if (this.frame) this.frame.contentWindow.postMessage(data, "*");
      else this.waiting.push(data);
    }

    terminate() {}
  };
}
