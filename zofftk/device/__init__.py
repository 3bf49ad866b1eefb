"""The machines the engine can run on, behind one small contract (`device.base`)."""
