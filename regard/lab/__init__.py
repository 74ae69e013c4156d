"""The lab: each file is a claim, a question about attention that a run answers with measured numbers."""
