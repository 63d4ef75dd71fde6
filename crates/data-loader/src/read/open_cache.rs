//! A limited number of open files or shards.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Open resources by number; the least recently used one is closed for another.
///
/// There are two kinds of locks. The lock of the map is held for a look-up only. The lock of an
/// entry is held while one thread opens it, and other threads that need it wait. No thread locks
/// an entry while it holds the lock of the map.
pub(crate) struct OpenCache<T> {
    capacity: usize,
    entries: Mutex<CacheEntries<T>>,
}

/// A resource, or `None` until it is open.
type CacheSlot<T> = Arc<Mutex<Option<Arc<T>>>>;

struct CacheEntries<T> {
    slots: BTreeMap<u64, (u64, CacheSlot<T>)>,
    /// Number of look-ups, the time of the last use of an entry.
    n_lookups: u64,
}

impl<T> OpenCache<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        let entries = CacheEntries { slots: BTreeMap::new(), n_lookups: 0 };
        Self { capacity: capacity.max(1), entries: Mutex::new(entries) }
    }

    /// Returns a resource, which `open` opens if necessary.
    pub(crate) fn get<E>(
        &self,
        key: u64,
        open: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let slot = self.slot(key);
        let mut resource = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(resource) = &*resource {
            return Ok(Arc::clone(resource));
        }
        Ok(Arc::clone(resource.insert(Arc::new(open()?))))
    }

    /// Returns true if the resource is open, or a thread is opening it.
    pub(crate) fn contains(&self, key: u64) -> bool {
        self.lock().slots.contains_key(&key)
    }

    fn lock(&self) -> MutexGuard<'_, CacheEntries<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the slot of a resource, which is now the most recently used one.
    fn slot(&self, key: u64) -> CacheSlot<T> {
        let mut entries = self.lock();
        entries.n_lookups += 1;
        let now = entries.n_lookups;
        if let Some((last_use, slot)) = entries.slots.get_mut(&key) {
            *last_use = now;
            return Arc::clone(slot);
        }
        let oldest = if entries.slots.len() < self.capacity {
            None
        } else {
            entries.slots.iter().min_by_key(|(_, (last_use, _))| *last_use).map(|(&key, _)| key)
        };
        let removed = oldest.and_then(|key| entries.slots.remove(&key));
        let slot = CacheSlot::default();
        entries.slots.insert(key, (now, Arc::clone(&slot)));
        drop(entries);
        // Closing may take long, so it happens without the lock.
        drop(removed);
        slot
    }
}

impl<T> fmt::Debug for OpenCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenCache").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}
