"""The solutions of the exercises: code that runs here, and stands in the teacher's notebook as it is."""
