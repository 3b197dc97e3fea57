"""Drafters: a small model, parallel inference, early exit, and the small model beside copied drafts."""
