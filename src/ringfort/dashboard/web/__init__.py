"""`ringfort dash`: a run in a browser.

security.py     who may look: one-time links, the cookie, Host and Origin, the content policy (pure)
feed.py         a view, and what has changed since the one before, as messages (pure)
hub.py          sends the messages to the browsers that look
app.py          what the page asks for, behind `security`
pages.py        the files in static/: ES modules, their style, and uPlot
server.py       the server, in a thread
certificate.py  the certificate of `--lan`
"""
