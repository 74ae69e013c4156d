"""Commands of `regard work` besides the worked solution."""
