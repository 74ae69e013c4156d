// Browsers start no worker from a file on disk. There, a hidden frame runs the script of the search instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.answer(data); // the script answers by postMessage of its own window
      this.inner.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.load(url).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.inner.document.createElement("script");
        script.src = String(url);
        script.onload = done;
        script.onerror = failed;
        this.inner.document.body.append(script);
      });
    }

    // as with a worker, a message is a copy and arrives later
    answer(data) {
      const event = new MessageEvent("message", { data: structuredClone(data) });
      setTimeout(() => {
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      });
    }

    postMessage(data) {
      const copy = structuredClone(data);
      if (this.ready) setTimeout(() => this.inner.dispatchEvent(new MessageEvent("message", { data: copy })));
      else this.waiting.push(copy);
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
