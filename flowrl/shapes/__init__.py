"""The embedded world: scenes of colored shapes, their captions, a renderer and an exact checker."""
