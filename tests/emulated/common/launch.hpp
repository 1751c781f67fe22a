/* Launches are left out of the sources: the emulation's own file of each folder runs the kernels. */
#pragma once
