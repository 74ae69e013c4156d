"""What the page shows, as JSON: pure functions, so that the server and the static export give the same."""
