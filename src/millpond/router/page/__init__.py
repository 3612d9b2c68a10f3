"""The live page: what people see of a running router.

``window`` remembers a bounded number of finished requests, ``verdict`` says in one sentence
whether sharing pays, ``state`` puts together what the page shows, ``serving`` answers browsers.
The page itself is ``page.html``, ``page.css`` and ``page.js``, sent as one document.
"""
