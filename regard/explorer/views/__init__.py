"""Functions that compute, as JSON data, what the explorer's page shows. The server and the static export call the same
functions.
"""
