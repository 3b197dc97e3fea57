// Three declarations of VK_EXT_layer_settings, which llama.cpp's Vulkan backend needs to compile and uses only to debug
// itself. Vulkan's headers have them since 1.3.272; those of Debian 12 are 1.3.239. tools/bootstrap.py includes this
// file before every other one (-include), so it must not include vulkan.hpp.
#if __has_include(<vulkan/vulkan_core.h>)
#include <vulkan/vulkan_core.h>
#ifndef VK_EXT_layer_settings

#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT : std::uint32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    std::uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    VkStructureType sType = static_cast<VkStructureType>(1000496000);
    const void * pNext = nullptr;
    std::uint32_t settingCount;
    const LayerSettingEXT * pSettings;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings) :
        settingCount(static_cast<std::uint32_t>(settings.size())), pSettings(settings.data()) {}
};

} // namespace vk

#endif
#endif
