#pragma once
#include "kv_pipeline.cuh"
#include "rows.cuh"
